// Turns the wide instructions on for everything after it: include it last, after every other header, in a file of
// kernels. Only code behind is_supported() may be reached then; the module itself loads on any CPU.
//
// TRIPTYCH_AVX512 is defined where the compiler can do it. A file guards its kernels with it and leaves its table of
// methods empty otherwise.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define TRIPTYCH_AVX512 1
#include <immintrin.h>
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16,avx2,fma,bmi,bmi2,amx-tile,amx-bf16")
#elif defined(__x86_64__) && defined(__clang__)
#define TRIPTYCH_AVX512 1
#include <immintrin.h>
#pragma clang attribute push( \
    __attribute__((target( \
        "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16,avx2,fma,bmi,bmi2,amx-tile,amx-bf16"))), \
    apply_to = function)
#define TRIPTYCH_AVX512_END _Pragma("clang attribute pop")
#endif
