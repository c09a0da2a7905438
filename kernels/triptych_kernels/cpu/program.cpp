// Programs: kernels that run one after the other, for one call from Python.
//
// A number of a kernel is fixed when the program is made, or is that of a register, which each run is told: what
// differs from step to step. Knows nothing of what kernels do.

#include "arguments.h"

#include <memory>
#include <utility>
#include <vector>

extern PyMethodDef program_methods[];

namespace triptych {
namespace {

constexpr const char* kProgramName = "triptych.program";

struct Step {
    const Kernel* kernel;
    size_t first_number;
};

struct Program {
    std::vector<Step> steps;
    std::vector<int64_t> numbers;
    std::vector<std::pair<size_t, Py_ssize_t>> places;  // in `numbers`, of registers
    Py_ssize_t num_registers;
};

void delete_program(PyObject* capsule) {
    delete static_cast<Program*>(PyCapsule_GetPointer(capsule, kProgramName));
}

// A step is (address of a kernel, its numbers, for each the register that it comes from or -1).
bool add_step(PyObject* step, Program& program) {
    long long address;
    PyObject *numbers, *registers;
    if (!PyArg_ParseTuple(step, "LO!O!", &address, &PyTuple_Type, &numbers, &PyTuple_Type, &registers)) return false;
    const auto* kernel = reinterpret_cast<const Kernel*>(address);
    if (!has_numbers(*kernel, PyTuple_GET_SIZE(numbers)) || !has_numbers(*kernel, PyTuple_GET_SIZE(registers)))
        return false;
    program.steps.push_back({kernel, program.numbers.size()});
    for (int place = 0; place < kernel->num_numbers(); ++place) {
        const Py_ssize_t source = PyLong_AsSsize_t(PyTuple_GET_ITEM(registers, place));
        int64_t number = 0;
        if (source >= 0) {
            program.places.emplace_back(program.numbers.size(), source);
        } else if (PyErr_Occurred() || !read_number(*kernel, place, PyTuple_GET_ITEM(numbers, place), &number)) {
            return false;
        }
        if (source >= program.num_registers) {
            PyErr_Format(PyExc_ValueError, "register %zd is not below %zd", source, program.num_registers);
            return false;
        }
        program.numbers.push_back(number);
    }
    return true;
}

PyObject* make_program(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 2 || !PyList_Check(arguments[1])) {
        return PyErr_Format(PyExc_TypeError, "make_program takes the number of registers and a list of steps");
    }
    auto program = std::make_unique<Program>();
    program->num_registers = PyLong_AsSsize_t(arguments[0]);
    if (program->num_registers < 0) {
        return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_ValueError, "the number of registers is negative");
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(arguments[1]); ++i) {
        if (!add_step(PyList_GET_ITEM(arguments[1], i), *program)) return nullptr;
    }
    PyObject* capsule = PyCapsule_New(program.get(), kProgramName, delete_program);
    if (capsule != nullptr) program.release();
    return capsule;
}

PyObject* run_program(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count < 1) return PyErr_Format(PyExc_TypeError, "run_program takes a program and its registers");
    const auto* program = static_cast<const Program*>(PyCapsule_GetPointer(arguments[0], kProgramName));
    if (program == nullptr) return nullptr;
    std::vector<int64_t> registers(program->num_registers);
    if (!read_numbers("run_program", arguments + 1, count - 1, registers.data(), program->num_registers)) {
        return nullptr;
    }
    // Of this run alone: another thread may run the same program.
    std::vector<int64_t> numbers = program->numbers;
    for (const auto& [place, source] : program->places) numbers[place] = registers[source];
    Outcome outcome;
    Py_BEGIN_ALLOW_THREADS
    for (const Step& step : program->steps) {
        outcome = run_kernel(*step.kernel, numbers.data() + step.first_number);
        if (outcome.exception != nullptr) break;
    }
    Py_END_ALLOW_THREADS
    return told(outcome);
}

}  // namespace
}  // namespace triptych

PyMethodDef program_methods[] = {
    TRIPTYCH_METHOD(make_program,
                    "make_program(num_registers, [(kernel, numbers, registers)]) -> program; register -1: none."),
    TRIPTYCH_METHOD(run_program, "run_program(program, *registers): its kernels, one after the other."),
    {nullptr, nullptr, 0, nullptr}};
