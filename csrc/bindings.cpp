// onepass._C: facts about the build and the machine, the plans of the calls that ran, and queries
// of hundreds of Python objects in one call. Host side only: no tensor crosses pybind11 (these
// queries treat a tensor like any other object), and the op libraries know nothing of Python.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/host.h"
#include "ops/optimizer.h"

namespace py = pybind11;

namespace {

// The op libraries that torch.ops.load_library has loaded already; set by attach().
const onepass::Host* cpu_host = nullptr;
const onepass::Host* cuda_host = nullptr;

void attach(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOLOAD | RTLD_LAZY);
  if (library == nullptr) throw std::runtime_error("onepass: " + path + " is not loaded");
  using Getter = const onepass::Host* (*)();
  if (const auto cpu = reinterpret_cast<Getter>(dlsym(library, "onepass_cpu_backend"))) {
    cpu_host = cpu();
  } else if (const auto cuda = reinterpret_cast<Getter>(dlsym(library, "onepass_cuda_backend"))) {
    cuda_host = cuda();
  } else {
    throw std::runtime_error("onepass: " + path + " is not an op library");
  }
}

const onepass::Host& attached() {
  if (cpu_host == nullptr) throw std::runtime_error("onepass: the op library is not attached");
  return *cpu_host;
}

void record(bool on) {
  attached().record(on);
  if (cuda_host != nullptr) cuda_host->record(on);
}

py::dict build_info() {
  py::dict info;
  info["version"] = ONEPASS_VERSION;
  info["build_type"] = ONEPASS_BUILD_TYPE;
  info["compiler"] = ONEPASS_COMPILER;
  info["torch_headers"] = ONEPASS_TORCH_HEADERS;
  info["cpu_levels"] = ONEPASS_CPU_LEVELS;
  info["cuda_archs"] = ONEPASS_CUDA_ARCHS;
  info["cuda_version"] = ONEPASS_CUDA_VERSION;
  return info;
}

py::list take() {
  py::list records;
  std::vector<onepass::Dispatch> calls = attached().take();
  if (cuda_host != nullptr) {
    std::vector<onepass::Dispatch> more = cuda_host->take();
    std::move(more.begin(), more.end(), std::back_inserter(calls));
  }
  for (const onepass::Dispatch& dispatch : calls) {
    py::dict record;
    record["op"] = dispatch.op;
    record["arguments"] = dispatch.arguments;
    record["kernel"] = dispatch.plan.kernel_name;
    record["level"] = dispatch.level;
    record["threads"] = dispatch.threads;
    record["rows_per_tile"] = dispatch.plan.rows_per_tile;
    record["splits"] = dispatch.plan.splits;
    record["workspace_bytes"] = dispatch.plan.workspace_bytes;
    record["reason"] = dispatch.plan.reason;
    records.append(std::move(record));
  }
  return records;
}

// The constants of ops/optimizer.h that Python uses.
py::dict optimizer_contract() {
  py::dict algorithms;
  for (int64_t i = 0; i < onepass::kAlgorithms; ++i) algorithms[onepass::kAlgorithmNames[i]] = i;
  py::list settings;
  for (const char* name : onepass::kHyperNames) settings.append(name);
  py::dict layout;
  layout["step"] = static_cast<int64_t>(onepass::kStepColumn);
  layout["moments"] = static_cast<int64_t>(onepass::kMomentColumn);
  layout["scales"] = static_cast<int64_t>(onepass::kScaleColumn);
  layout["master"] = static_cast<int64_t>(onepass::kMasterColumn);
  layout["average"] = static_cast<int64_t>(onepass::kAverageColumn);
  layout["columns"] = static_cast<int64_t>(onepass::kLayoutColumns);
  py::dict contract;
  contract["algorithms"] = algorithms;
  contract["settings"] = settings;
  contract["layout"] = layout;
  contract["code_block"] = onepass::kCodeBlock;
  return contract;
}

double ceiling(double (*measure)(double), double seconds) {
  const py::gil_scoped_release release;
  return measure(seconds);
}

// ---- objects, compared by identity --------------------------------------------------------------

// ([getattr(o, name) for o in objects], how many of them are None). Reading an attribute may run
// any Python code: the objects are held, and looked up in the list again each time.
py::tuple attributes(const py::list& objects, const py::str& name) {
  py::list values;
  Py_ssize_t missing = 0;
  const Py_ssize_t count = PyList_GET_SIZE(objects.ptr());
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const found = PyList_GetItem(objects.ptr(), i);
    if (found == nullptr) throw py::error_already_set();
    const auto object = py::reinterpret_borrow<py::object>(found);
    const auto value =
        py::reinterpret_steal<py::object>(PyObject_GetAttr(object.ptr(), name.ptr()));
    if (!value || PyList_Append(values.ptr(), value.ptr()) != 0) throw py::error_already_set();
    missing += value.is_none();
  }
  return py::make_tuple(std::move(values), missing);
}

// Calls next(object) for what a table of an optimizer was made from: the parameters of each group,
// None after each, then the keys and values of the state and of its entries. False where a call
// returns false, which must not run Python code, and where a sequence is neither list nor tuple
// (reading an iterator would exhaust it), the state or an entry no dict.
template <class Next>
bool for_each_watched(const py::list& groups, const py::object& state, Next&& next) {
  for (const py::handle group : groups) {
    if (!PyList_Check(group.ptr()) && !PyTuple_Check(group.ptr())) return false;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(group.ptr()); ++i) {
      if (!next(PySequence_Fast_GET_ITEM(group.ptr(), i))) return false;
    }
    if (!next(Py_None)) return false;
  }
  PyObject *of, *entry, *key, *value;
  if (!PyDict_Check(state.ptr())) return false;
  for (Py_ssize_t outer = 0; PyDict_Next(state.ptr(), &outer, &of, &entry);) {
    if (!next(of) || !next(entry) || !PyDict_Check(entry)) return false;
    for (Py_ssize_t inner = 0; PyDict_Next(entry, &inner, &key, &value);) {
      if (!next(key) || !next(value)) return false;
    }
  }
  return true;
}

// The objects in the order of for_each_watched, held so that no other can get the address of one.
py::list contents(const py::list& groups, const py::object& state) {
  py::list objects;
  for_each_watched(groups, state, [&](PyObject* object) {
    objects.append(py::handle(object));
    return true;
  });
  return objects;
}

// Whether groups and state still hold the objects that contents() found, in the same order.
bool holds(const py::list& groups, const py::object& state, const py::list& objects) {
  const Py_ssize_t count = PyList_GET_SIZE(objects.ptr());
  Py_ssize_t at = 0;
  const bool same = for_each_watched(groups, state, [&](PyObject* object) {
    return at < count && PyList_GET_ITEM(objects.ptr(), at++) == object;
  });
  return same && at == count;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Build facts, CPU levels, recorded plans, identities of objects. No tensors.";
  m.def("attach", &attach, "Finds the loaded op library at this path.");
  m.def("build_info", &build_info, "What this package was built from and for.");
  m.def(
      "optimizer_contract", &optimizer_contract,
      "Numbers of algorithms, columns of settings and layouts, as csrc/ops/optimizer.h has them.");
  m.def("cpu_levels", [] { return attached().levels(); }, "Levels that this machine supports.");
  m.def("cpu_level", [] { return std::string(attached().backend().name); }, "The level in use.");
  m.def("record", &record, "Starts or stops recording plans.");
  m.def(
      "parallel_regions", [] { return attached().regions(); },
      "Parallel regions that CPU operators of this process have entered.");
  m.def("take", &take, "Plans recorded since the last take.");
  m.def(
      "fma_ceiling",
      [](double seconds) { return ceiling(attached().backend().fma_ceiling, seconds); },
      "GFLOP/s of one thread in float32 fused multiply-add, measured for about this long.");
  m.def(
      "bf16_dot_ceiling",
      [](double seconds) { return ceiling(attached().backend().bf16_dot_ceiling, seconds); },
      "GFLOP/s of one thread in bfloat16 dot products; 0 where the level has none.");
  m.def(
      "int8_dot_ceiling",
      [](double seconds) {
        if (!attached().machine().multiplies_bytes) return 0.0;
        return ceiling(attached().backend().int8_dot_ceiling, seconds);
      },
      "Billions of operations per second of one thread in int8 dot products; 0 without VNNI.");
  m.def(
      "multiplies_bytes", [] { return attached().machine().multiplies_bytes; },
      "Whether this CPU has dot products of bytes: VNNI, or AVX-VNNI at level avx2.");
  m.def("attributes", &attributes, "The attribute of each object, and how many of them are None.");
  m.def("contents", &contents, "The parameters of groups, and the keys and values of their state.");
  m.def("holds", &holds, "Whether groups and state still hold what contents() found.");
}
