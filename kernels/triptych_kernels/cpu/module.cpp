// triptych_kernels.cpu._native: the native CPU kernels as one extension module. Knows Python, no tensors:
// addresses, sizes and strides come in as integers, checked by the Python wrappers beside this file.

#include "arguments.h"

#include <initializer_list>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__linux__) && defined(__x86_64__)
#include <cerrno>
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "pool.h"

extern PyMethodDef linear_methods[];
extern PyMethodDef experts_methods[];
extern PyMethodDef attention_methods[];
extern PyMethodDef elementwise_methods[];
extern PyMethodDef penalties_methods[];

namespace triptych {
namespace {

// Everything that the kernels' target pragma names but AMX, for which request_amx asks. GCC's and clang's builtin also
// asks the system whether it saves the wide registers.
bool can_run_kernels() {
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
#else
    return false;
#endif
}

// Asks the system for the tile registers, for this process from now on: 0 if it may use them, an error number if not,
// -1 on a CPU without.
int request_tile_registers() {
#if defined(__linux__) && defined(__x86_64__)
    constexpr unsigned kBf16Bit = 1u << 22, kTileBit = 1u << 24;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl; ARCH_REQ_XCOMP_PERM
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!can_run_kernels() || __get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kBf16Bit) == 0 ||
        (d & kTileBit) == 0) {
        return -1;
    }
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : errno;
#else
    return -1;
#endif
}

PyObject* request_amx(PyObject*, PyObject*) { return PyLong_FromLong(request_tile_registers()); }

PyObject* is_supported(PyObject*, PyObject*) { return PyBool_FromLong(can_run_kernels()); }

PyObject* set_num_threads(PyObject*, PyObject* argument) {
    const long wanted = PyLong_AsLong(argument);
    if (wanted == -1 && PyErr_Occurred()) {
        return nullptr;
    }
    if (wanted < 1 || wanted > 1024) {
        PyErr_Format(PyExc_ValueError, "num_threads is %ld, not within 1 to 1024", wanted);
        return nullptr;
    }
    triptych::set_num_threads(static_cast<int>(wanted));
    Py_RETURN_NONE;
}

PyObject* num_threads(PyObject*, PyObject*) { return PyLong_FromLong(triptych::num_threads()); }

// Tests the pool: how often each of num_tasks tasks ran, as bytes.
PyObject* count_task_runs(PyObject*, PyObject* argument) {
    const Py_ssize_t num_tasks = PyLong_AsSsize_t(argument);
    if (num_tasks < 0) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_ValueError, "num_tasks is negative");
        }
        return nullptr;
    }
    PyObject* counts = PyBytes_FromStringAndSize(nullptr, num_tasks);
    if (counts == nullptr) {
        return nullptr;
    }
    char* data = PyBytes_AS_STRING(counts);
    for (Py_ssize_t i = 0; i < num_tasks; ++i) {
        data[i] = 0;
    }
    Py_BEGIN_ALLOW_THREADS
    triptych::parallel_for(num_tasks, [&](int64_t task) { ++data[task]; });
    Py_END_ALLOW_THREADS
    return counts;
}

PyObject* prefer_large_pages(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    int64_t numbers[2];
    if (!read_numbers("prefer_large_pages", arguments, count, numbers, 2)) {
        return nullptr;
    }
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr int64_t kLargePage = 2 << 20;
    const int64_t first = (numbers[0] + kLargePage - 1) / kLargePage * kLargePage;
    const int64_t end = (numbers[0] + numbers[1]) / kLargePage * kLargePage;
    // A wish: a kernel without large pages says no, and nothing is lost.
    if (first < end) {
        (void)madvise(reinterpret_cast<void*>(first), static_cast<size_t>(end - first), MADV_HUGEPAGE);
    }
#endif
    Py_RETURN_NONE;
}

PyMethodDef own_methods[] = {
    {"is_supported", is_supported, METH_NOARGS, "is_supported() -> whether this CPU can run the kernels."},
    {"request_amx", request_amx, METH_NOARGS,
     "request_amx() -> 0 if this process may use AMX from now on, else why not: an error number, -1 for the CPU."},
    {"set_num_threads", set_num_threads, METH_O,
     "set_num_threads(n): threads, the caller included, that a call uses."},
    {"num_threads", num_threads, METH_NOARGS, "num_threads() -> threads that a call uses; 1 until set."},
    {"count_task_runs", count_task_runs, METH_O,
     "count_task_runs(n) -> how often each of n tasks of the pool ran."},
    TRIPTYCH_METHOD(prefer_large_pages, "prefer_large_pages(address, num_bytes): of memory not yet touched."),
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "_native",
                          "Native CPU kernels of triptych.",
                          -1,
                          own_methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace
}  // namespace triptych

PyMODINIT_FUNC PyInit__native() {
    PyObject* module = PyModule_Create(&triptych::definition);
    if (module == nullptr) {
        return nullptr;
    }
    for (PyMethodDef* methods : {linear_methods, experts_methods, attention_methods, elementwise_methods,
                                 penalties_methods}) {
        if (PyModule_AddFunctions(module, methods) < 0) {
            Py_DECREF(module);
            return nullptr;
        }
    }
    return module;
}
