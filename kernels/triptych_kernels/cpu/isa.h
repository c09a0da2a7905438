// Enables the instructions that a file of kernels is compiled for: include it after every header that has no kernels.
// Only code guarded by supports() may be reached then; the module itself loads on any CPU.
//
// Such files are compiled twice: for AVX-512 with BF16 (and AMX), and through the folder avx2 for AVX2 with FMA. The
// differences are in the folders of these names: vectors of sixteen numbers, and what depends on the registers.
// Headers of kernels define everything in an unnamed namespace, or the linker would use one version for both.
//
// TRIPTYCH_KERNELS is defined if the compiler supports this. Otherwise a file leaves its tables of methods and of
// kernels empty.
#pragma once

#ifdef TRIPTYCH_AVX2
#define TRIPTYCH_OF_ISA(header) TRIPTYCH_TEXT(avx2/header)
#define TRIPTYCH_METHODS(name) name##_avx2_methods
#define TRIPTYCH_KERNELS_OF(name) name##_avx2_kernels
#define TRIPTYCH_TARGET "avx2,fma,f16c,bmi,bmi2"
#else
#define TRIPTYCH_OF_ISA(header) TRIPTYCH_TEXT(avx512/header)
#define TRIPTYCH_METHODS(name) name##_avx512_methods
#define TRIPTYCH_KERNELS_OF(name) name##_avx512_kernels
#ifdef TRIPTYCH_EMULATED
// Defined by a header of the tests, for CPUs that have only AVX2.
#define TRIPTYCH_TARGET "avx2,fma,f16c,bmi,bmi2"
#else
#define TRIPTYCH_TARGET \
    "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16,avx512vnni,avx2,fma,f16c,bmi,bmi2,amx-tile,amx-bf16"
#endif
#endif
#define TRIPTYCH_TEXT(text) #text
#define TRIPTYCH_PRAGMA(text) _Pragma(#text)

#if defined(__x86_64__) && defined(__GNUC__)
#define TRIPTYCH_KERNELS 1
#include <immintrin.h>
#ifdef __clang__
#define TRIPTYCH_CLANG_TARGET(names) \
    TRIPTYCH_PRAGMA(clang attribute push(__attribute__((target(names))), apply_to = function))
TRIPTYCH_CLANG_TARGET(TRIPTYCH_TARGET)
#define TRIPTYCH_KERNELS_END _Pragma("clang attribute pop")
#else
#define TRIPTYCH_GCC_TARGET(names) TRIPTYCH_PRAGMA(GCC target(names))
TRIPTYCH_GCC_TARGET(TRIPTYCH_TARGET)
#endif
#define TRIPTYCH_INLINE [[gnu::always_inline]] inline
#if defined(TRIPTYCH_EMULATED) && !defined(TRIPTYCH_AVX2)
#include "emulated/instructions.h"
#endif
#include TRIPTYCH_OF_ISA(vectors.h)
#endif
