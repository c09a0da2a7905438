// The kernels of experts.cpp for CPUs with AVX2.
#define TRIPTYCH_AVX2
#include "../experts.cpp"
