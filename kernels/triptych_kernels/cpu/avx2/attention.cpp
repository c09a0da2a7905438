// The kernels of attention.cpp for CPUs with AVX2.
#define TRIPTYCH_AVX2
#include "../attention.cpp"
