// The kernels of elementwise.cpp for CPUs with AVX2.
#define TRIPTYCH_AVX2
#include "../elementwise.cpp"
