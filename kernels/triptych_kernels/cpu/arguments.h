// Calls from Python to kernels: numbers by position (addresses, strides, sizes), followed by fractions.
//
// A kernel is a function of such numbers that needs no interpreter, so that a program of them (program.cpp) can run.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>

namespace triptych {

// Result of a kernel: either it did everything, or nothing, for the reason in the exception and its text.
struct Outcome {
    PyObject* exception = nullptr;  // one of Python's own, borrowed
    char text[160] = "";
};

[[gnu::format(printf, 2, 3)]] inline Outcome failed(PyObject* exception, const char* format, ...) {
    Outcome outcome;
    outcome.exception = exception;
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(outcome.text, sizeof outcome.text, format, arguments);
    va_end(arguments);
    return outcome;
}

inline Outcome done_if(bool has_memory) {
    return has_memory ? Outcome{} : failed(PyExc_MemoryError, "out of memory");
}

struct Kernel {
    const char* name;
    const char* plan_name;  // of the capsule before the integers, null if there is none
    int num_integers, num_fractions;
    Outcome (*run)(const int64_t* numbers);         // address of the plan, the integers, the bits of doubles
    bool (*keeps_lock)(const int64_t* numbers);  // whether releasing the interpreter's lock would take longer; null: no
    const char* text;

    constexpr int num_numbers() const { return (plan_name != nullptr) + num_integers + num_fractions; }
};

constexpr int kMaxNumbers = 32;

inline Outcome run_kernel(const Kernel& kernel, const int64_t* numbers) {
    try {
        return kernel.run(numbers);
    } catch (const std::bad_alloc&) {
        return done_if(false);
    }
}

inline double fraction(int64_t bits) {
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Reads the number at `index` of a kernel. False, with an exception set, if the argument is no number.
inline bool read_number(const Kernel& kernel, int index, PyObject* argument, int64_t* number) {
    if (index == 0 && kernel.plan_name != nullptr) {
        *number = reinterpret_cast<int64_t>(PyCapsule_GetPointer(argument, kernel.plan_name));
    } else if (index >= kernel.num_numbers() - kernel.num_fractions) {
        const double value = PyFloat_AsDouble(argument);
        std::memcpy(number, &value, sizeof value);
    } else {
        *number = PyLong_AsLongLong(argument);
    }
    return PyErr_Occurred() == nullptr;
}

inline bool has_numbers(const Kernel& kernel, Py_ssize_t count) {
    if (count == kernel.num_numbers()) return true;
    PyErr_Format(PyExc_TypeError, "%s takes %d numbers, got %zd", kernel.name, kernel.num_numbers(), count);
    return false;
}

// None, or null with the exception set.
inline PyObject* to_python(const Outcome& outcome) {
    if (outcome.exception == nullptr) Py_RETURN_NONE;
    PyErr_SetString(outcome.exception, outcome.text);
    return nullptr;
}

// The Python function that calls a kernel.
template <const Kernel& kernel>
PyObject* call_kernel(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    static_assert(kernel.num_numbers() <= kMaxNumbers);
    int64_t numbers[kMaxNumbers];
    if (!has_numbers(kernel, count)) return nullptr;
    for (int i = 0; i < kernel.num_numbers(); ++i) {
        if (!read_number(kernel, i, arguments[i], &numbers[i])) return nullptr;
    }
    Outcome outcome;
    if (kernel.keeps_lock != nullptr && kernel.keeps_lock(numbers)) {
        outcome = run_kernel(kernel, numbers);
    } else {
        Py_BEGIN_ALLOW_THREADS
        outcome = run_kernel(kernel, numbers);
        Py_END_ALLOW_THREADS
    }
    return to_python(outcome);
}

// Reads exactly `wanted` integers. False, with an exception set, for other arguments.
inline bool read_numbers(
    const char* function, PyObject* const* arguments, Py_ssize_t count, int64_t* numbers, Py_ssize_t wanted) {
    if (count != wanted) {
        PyErr_Format(PyExc_TypeError, "%s takes %zd numbers, got %zd", function, wanted, count);
        return false;
    }
    for (Py_ssize_t i = 0; i < wanted; ++i) numbers[i] = PyLong_AsLongLong(arguments[i]);
    return PyErr_Occurred() == nullptr;
}

}  // namespace triptych

// A method table entry for a function of namespace triptych.
#define TRIPTYCH_METHOD(name, text) \
    {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(triptych::name)), METH_FASTCALL, text}
// The same for a kernel.
#define TRIPTYCH_KERNEL_METHOD(kernel)                                                                            \
    {triptych::kernel.name,                                                                                        \
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(triptych::call_kernel<triptych::kernel>)),         \
     METH_FASTCALL, triptych::kernel.text}
