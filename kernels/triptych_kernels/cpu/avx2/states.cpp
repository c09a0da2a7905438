// The kernels of states.cpp for CPUs with AVX2.
#define TRIPTYCH_AVX2
#include "../states.cpp"
