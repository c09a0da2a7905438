// How a kernel's function is called from its Python wrapper: numbers (addresses, strides, sizes) by position.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace triptych {

// Reads exactly `wanted` integers. False, with an exception set, where the arguments are others.
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

// An entry of a table of methods for a function of namespace triptych.
#define TRIPTYCH_METHOD(name, text) \
    {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(triptych::name)), METH_FASTCALL, text}
