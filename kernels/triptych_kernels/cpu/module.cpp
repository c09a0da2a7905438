// triptych_kernels.cpu._native: the native CPU kernels as one extension module. Knows Python, no tensors:
// addresses, sizes and strides come in as integers, checked by the Python wrappers beside this file.

#include "arguments.h"

#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif
#if defined(__linux__) && defined(__x86_64__)
#include <cerrno>
#include <cpuid.h>
#include <sys/syscall.h>
#endif

#include "pool.h"

extern PyMethodDef linear_avx512_methods[], linear_avx2_methods[];
extern PyMethodDef experts_avx512_methods[], experts_avx2_methods[];
extern PyMethodDef attention_avx512_methods[], attention_avx2_methods[];
extern PyMethodDef elementwise_avx512_methods[], elementwise_avx2_methods[];
extern PyMethodDef states_avx512_methods[], states_avx2_methods[];
extern PyMethodDef penalties_methods[], program_methods[], token_mask_methods[];
extern const triptych::Kernel* const linear_avx512_kernels[];
extern const triptych::Kernel* const linear_avx2_kernels[];
extern const triptych::Kernel* const experts_avx512_kernels[];
extern const triptych::Kernel* const experts_avx2_kernels[];
extern const triptych::Kernel* const attention_avx512_kernels[];
extern const triptych::Kernel* const attention_avx2_kernels[];
extern const triptych::Kernel* const elementwise_avx512_kernels[];
extern const triptych::Kernel* const elementwise_avx2_kernels[];
extern const triptych::Kernel* const states_avx512_kernels[];
extern const triptych::Kernel* const states_avx2_kernels[];

namespace triptych {
namespace {

// The features in the kernels' target pragmas except AMX, which request_amx checks, and F16C, which every CPU with AVX2
// has. GCC's and clang's builtin also checks whether the system saves the wide registers.
bool has_avx2() {
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
           __builtin_cpu_supports("bmi2");
#else
    return false;
#endif
}

bool has_avx512() {
#if defined(TRIPTYCH_EMULATED)
    return has_avx2();
#elif defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16") &&
           __builtin_cpu_supports("avx512vnni");
#else
    return false;
#endif
}

// Asks the system for the tile registers, for this process from now on: 0 if it may use them, an error number if not,
// -1 on a CPU without them.
int request_tile_registers() {
#if defined(TRIPTYCH_EMULATED)
    return has_avx512() ? 0 : -1;
#elif defined(__linux__) && defined(__x86_64__)
    constexpr unsigned kBf16Bit = 1u << 22, kTileBit = 1u << 24;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl; ARCH_REQ_XCOMP_PERM
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!has_avx512() || __get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kBf16Bit) == 0 ||
        (d & kTileBit) == 0) {
        return -1;
    }
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : errno;
#else
    return -1;
#endif
}

PyObject* request_amx(PyObject*, PyObject*) { return PyLong_FromLong(request_tile_registers()); }

// Kernels for one instruction set: a module within this one, with the number of columns of a panel of its weights.
struct Kernels {
    const char *name, *full_name;
    long panel_columns;
    bool (*can_run)();
    PyMethodDef* methods[5];
    const Kernel* const* kernels[5];
};

const Kernels kKernels[] = {
    {"avx512", "triptych_kernels.cpu._native.avx512", 32, has_avx512,
     {linear_avx512_methods, experts_avx512_methods, attention_avx512_methods, elementwise_avx512_methods,
      states_avx512_methods},
     {linear_avx512_kernels, experts_avx512_kernels, attention_avx512_kernels, elementwise_avx512_kernels,
      states_avx512_kernels}},
    {"avx2", "triptych_kernels.cpu._native.avx2", 16, has_avx2,
     {linear_avx2_methods, experts_avx2_methods, attention_avx2_methods, elementwise_avx2_methods,
      states_avx2_methods},
     {linear_avx2_kernels, experts_avx2_kernels, attention_avx2_kernels, elementwise_avx2_kernels,
      states_avx2_kernels}},
};

PyObject* supports(PyObject*, PyObject* argument) {
    const char* name = PyUnicode_AsUTF8(argument);
    if (name == nullptr) {
        return nullptr;
    }
    for (const Kernels& kernels : kKernels) {
        if (std::strcmp(kernels.name, name) == 0) {
            return PyBool_FromLong(kernels.can_run());
        }
    }
    return PyErr_Format(PyExc_ValueError, "there are no kernels for %R", argument);
}

// {name: address}, for make_program.
PyObject* addresses_of(const Kernels& kernels) {
    PyObject* addresses = PyDict_New();
    for (const Kernel* const* table : kernels.kernels) {
        for (; addresses != nullptr && *table != nullptr; ++table) {
            PyObject* address = PyLong_FromLongLong(reinterpret_cast<int64_t>(*table));
            if (address == nullptr || PyDict_SetItemString(addresses, (*table)->name, address) < 0) {
                Py_CLEAR(addresses);
            }
            Py_XDECREF(address);
        }
    }
    return addresses;
}

bool add_kernels(PyObject* module, const Kernels& kernels) {
    PyObject* added = PyModule_New(kernels.full_name);
    if (added == nullptr) {
        return false;
    }
    for (PyMethodDef* methods : kernels.methods) {
        if (PyModule_AddFunctions(added, methods) < 0) {
            Py_DECREF(added);
            return false;
        }
    }
    PyObject* addresses = addresses_of(kernels);
    const bool is_added = addresses != nullptr && PyModule_AddObjectRef(added, "addresses", addresses) == 0 &&
                          PyModule_AddIntConstant(added, "panel_columns", kernels.panel_columns) == 0 &&
                          PyModule_AddObjectRef(module, kernels.name, added) == 0;
    Py_XDECREF(addresses);
    Py_DECREF(added);
    return is_added;
}

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

PyObject* prefer_pages(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    int64_t numbers[3];
    if (!read_numbers("prefer_pages", arguments, count, numbers, 3)) {
        return nullptr;
    }
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const bool are_large = numbers[2] != 0;
    const int64_t page = are_large ? 2 << 20 : sysconf(_SC_PAGESIZE);
    const int64_t first = (numbers[0] + page - 1) / page * page;
    const int64_t end = (numbers[0] + numbers[1]) / page * page;
    // Only advice: a system without large pages refuses it, without consequences.
    if (first < end) {
        (void)madvise(reinterpret_cast<void*>(first), static_cast<size_t>(end - first),
                      are_large ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    }
#endif
    Py_RETURN_NONE;
}

// Since Linux 5.14; older headers lack it, and older kernels refuse it.
#if defined(__linux__) && !defined(MADV_POPULATE_WRITE)
#define MADV_POPULATE_WRITE 23
#endif

PyObject* populate(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    int64_t numbers[2];
    if (!read_numbers("populate", arguments, count, numbers, 2)) {
        return nullptr;
    }
    bool is_there = false;
#if defined(__linux__)
    const int64_t page = sysconf(_SC_PAGESIZE);
    const int64_t first = numbers[0] / page * page, end = (numbers[0] + numbers[1] + page - 1) / page * page;
    Py_BEGIN_ALLOW_THREADS
    is_there = madvise(reinterpret_cast<void*>(first), static_cast<size_t>(end - first), MADV_POPULATE_WRITE) == 0;
    Py_END_ALLOW_THREADS
#endif
    return PyBool_FromLong(is_there);
}

PyMethodDef own_methods[] = {
    {"supports", supports, METH_O, "supports(name) -> whether this CPU can run the kernels in that module of this."},
    {"request_amx", request_amx, METH_NOARGS,
     "request_amx() -> 0 if this process may use AMX from now on, else why not: an error number, -1 for the CPU."},
    {"set_num_threads", set_num_threads, METH_O,
     "set_num_threads(n): threads, the caller included, that a call uses."},
    {"num_threads", num_threads, METH_NOARGS, "num_threads() -> threads that a call uses; 1 until set."},
    {"count_task_runs", count_task_runs, METH_O,
     "count_task_runs(n) -> how often each of n tasks of the pool ran."},
    TRIPTYCH_METHOD(prefer_pages, "prefer_pages(address, num_bytes, are_large): of memory not yet touched."),
    TRIPTYCH_METHOD(populate, "populate(address, num_bytes) -> whether there is memory for it now."),
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
    bool is_complete = PyModule_AddFunctions(module, penalties_methods) == 0 &&
                       PyModule_AddFunctions(module, program_methods) == 0 &&
                       PyModule_AddFunctions(module, token_mask_methods) == 0;
    for (const triptych::Kernels& kernels : triptych::kKernels) {
        is_complete = is_complete && triptych::add_kernels(module, kernels);
    }
    if (!is_complete) {
        Py_DECREF(module);
        return nullptr;
    }
    return module;
}
