// Programs: kernels that run one after the other, for one call from Python.
//
// A number of a kernel is fixed when the program is made, or that of a register, which is passed to each run: what
// differs from step to step. A part of a program may run for a few rows at a time, so that what one kernel writes is
// still in the caches when the next reads it. Knows nothing about the kernels.

#include "arguments.h"

#include <algorithm>
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

// A number that is passed to each run: a register's value, plus row_bytes for each row before the current ones.
struct RegisterArgument {
    size_t number;
    Py_ssize_t source;
    int64_t row_bytes;
};

// Steps that run together. The register `count` has the number of rows; for the steps it has the number of current
// rows. `at_once` has the maximum of that. Below 0: steps that run once.
struct Part {
    std::vector<Step> steps;
    std::vector<RegisterArgument> register_arguments;
    Py_ssize_t count, at_once;
};

struct Program {
    std::vector<Part> parts;
    std::vector<int64_t> numbers;
    Py_ssize_t num_registers;
};

void delete_program(PyObject* capsule) {
    delete static_cast<Program*>(PyCapsule_GetPointer(capsule, kProgramName));
}

bool is_register(Py_ssize_t index, const Program& program) {
    if (index < program.num_registers) return true;
    PyErr_Format(PyExc_ValueError, "register %zd is not below %zd", index, program.num_registers);
    return false;
}

// A step is (address of a kernel, its numbers, for each number its register or -1, and its bytes per row).
bool add_step(PyObject* step, Program& program, Part& part) {
    long long address;
    PyObject *numbers, *registers, *row_bytes;
    if (!PyArg_ParseTuple(
            step, "LO!O!O!", &address, &PyTuple_Type, &numbers, &PyTuple_Type, &registers, &PyTuple_Type, &row_bytes))
        return false;
    const auto* kernel = reinterpret_cast<const Kernel*>(address);
    for (PyObject* each : {numbers, registers, row_bytes}) {
        if (!has_numbers(*kernel, PyTuple_GET_SIZE(each))) return false;
    }
    part.steps.push_back({kernel, program.numbers.size()});
    for (int index = 0; index < kernel->num_numbers(); ++index) {
        const Py_ssize_t source = PyLong_AsSsize_t(PyTuple_GET_ITEM(registers, index));
        const long long bytes = PyLong_AsLongLong(PyTuple_GET_ITEM(row_bytes, index));
        int64_t number = 0;
        if (PyErr_Occurred() || !is_register(source, program)) return false;
        if (source >= 0) {
            part.register_arguments.push_back({program.numbers.size(), source, bytes});
        } else if (!read_number(*kernel, index, PyTuple_GET_ITEM(numbers, index), &number)) {
            return false;
        }
        program.numbers.push_back(number);
    }
    return true;
}

// A part is (register of the number of rows, register of the number at once, steps); -1 for no register.
bool add_part(PyObject* description, Program& program) {
    Part part;
    PyObject* steps;
    if (!PyArg_ParseTuple(description, "nnO!", &part.count, &part.at_once, &PyList_Type, &steps)) return false;
    if (!is_register(part.count, program) || !is_register(part.at_once, program)) return false;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(steps); ++i) {
        if (!add_step(PyList_GET_ITEM(steps, i), program, part)) return false;
    }
    program.parts.push_back(std::move(part));
    return true;
}

PyObject* make_program(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 2 || !PyList_Check(arguments[1])) {
        return PyErr_Format(PyExc_TypeError, "make_program takes the number of registers and a list of parts");
    }
    auto program = std::make_unique<Program>();
    program->num_registers = PyLong_AsSsize_t(arguments[0]);
    if (program->num_registers < 0) {
        return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_ValueError, "the number of registers is negative");
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(arguments[1]); ++i) {
        if (!add_part(PyList_GET_ITEM(arguments[1], i), *program)) return nullptr;
    }
    PyObject* capsule = PyCapsule_New(program.get(), kProgramName, delete_program);
    if (capsule != nullptr) program.release();
    return capsule;
}

// Runs the steps for the `count` rows starting at `first`.
Outcome run_steps(const Part& part, const int64_t* registers, int64_t first, int64_t count, int64_t* numbers) {
    for (const auto& [number, source, row_bytes] : part.register_arguments) {
        numbers[number] = source == part.count ? count : registers[source] + first * row_bytes;
    }
    for (const Step& step : part.steps) {
        const Outcome outcome = run_kernel(*step.kernel, numbers + step.first_number);
        if (outcome.exception != nullptr) return outcome;
    }
    return Outcome{};
}

Outcome run_part(const Part& part, const int64_t* registers, int64_t* numbers) {
    if (part.count < 0) return run_steps(part, registers, 0, 0, numbers);
    const int64_t num_rows = registers[part.count], at_once = std::max<int64_t>(1, registers[part.at_once]);
    for (int64_t first = 0; first < num_rows; first += at_once) {
        const Outcome outcome = run_steps(part, registers, first, std::min(at_once, num_rows - first), numbers);
        if (outcome.exception != nullptr) return outcome;
    }
    return Outcome{};
}

PyObject* run_program(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count < 1) return PyErr_Format(PyExc_TypeError, "run_program takes a program and its registers");
    const auto* program = static_cast<const Program*>(PyCapsule_GetPointer(arguments[0], kProgramName));
    if (program == nullptr) return nullptr;
    std::vector<int64_t> registers(program->num_registers);
    if (!read_numbers("run_program", arguments + 1, count - 1, registers.data(), program->num_registers)) {
        return nullptr;
    }
    // A copy for this run: another thread may run the same program.
    std::vector<int64_t> numbers = program->numbers;
    Outcome outcome;
    Py_BEGIN_ALLOW_THREADS
    for (const Part& part : program->parts) {
        outcome = run_part(part, registers.data(), numbers.data());
        if (outcome.exception != nullptr) break;
    }
    Py_END_ALLOW_THREADS
    return to_python(outcome);
}

}  // namespace
}  // namespace triptych

PyMethodDef program_methods[] = {
    TRIPTYCH_METHOD(make_program,
                    "make_program(num_registers, [(count, at_once, [(kernel, numbers, registers, row_bytes)])]) -> "
                    "program; register -1: none."),
    TRIPTYCH_METHOD(run_program, "run_program(program, *registers): its kernels, part after part."),
    {nullptr, nullptr, 0, nullptr}};
