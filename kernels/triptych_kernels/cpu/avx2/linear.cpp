// The kernels of linear.cpp for CPUs with AVX2.
#define TRIPTYCH_AVX2
#include "../linear.cpp"
