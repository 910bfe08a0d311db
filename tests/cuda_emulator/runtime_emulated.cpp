// The runtime of the tests' library, beside those of csrc/ops: the CUDA back end under the
// emulator, for tensors on the CPU, in the process of the tests. tests/emulator/executors.py loads
// it.
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include "kept.h"
#include "ops/runtime.h"

namespace onepass {
namespace {

// The memory that a call may point to. Memory of earlier calls may be freed: each call begins with
// none.
class Memories {
 public:
  void add(emulator::KnownMemory memory) {
    if (memory.end == memory.begin) return;
    auto next = by_begin_.upper_bound(memory.begin);
    if (next != by_begin_.begin() && std::prev(next)->second.end > memory.begin) --next;
    while (next != by_begin_.end() && next->first < memory.end) {  // a view of the same memory
      memory.begin = std::min(memory.begin, next->second.begin);
      memory.end = std::max(memory.end, next->second.end);
      memory.element = std::max(memory.element, next->second.element);
      next = by_begin_.erase(next);
    }
    by_begin_[memory.begin] = memory;
  }

  const emulator::KnownMemory* find(uintptr_t address) const {
    const auto next = by_begin_.upper_bound(address);
    if (next == by_begin_.begin()) return nullptr;
    const emulator::KnownMemory& memory = std::prev(next)->second;
    return address < memory.end ? &memory : nullptr;
  }

  void forget() { by_begin_.clear(); }

 private:
  std::map<uintptr_t, emulator::KnownMemory> by_begin_;  // without overlaps
};

struct State {
  Memories memories;
  int64_t shift = 0;        // bytes by which tensors are moved
  int64_t misaligned = -1;  // the tensor that is, in the order of the struct's addresses; -1: all
  // The dimension, from 1, of tensors of four dimensions whose offsets exceed 32 bits; 0: none.
  int64_t far = 0;      // for arguments of an operator
  int64_t far_new = 0;  // for tensors that it makes
  bool plain = false;   // attention's plain kernels also run calls that fit its tiles
  bool runs = true;     // planned calls are run
  std::string folder;   // for files of calls; empty: none are written
  int64_t files = 0;
  std::ostringstream calls;  // as JSON, each after a comma
  std::string text;          // the last text that was returned
};

State& state() {
  static auto* const one = new State;
  return *one;
}

void log_call(const Plan& plan, int64_t tensors) {
  const emulator::Counters& counted = emulator::counters();
  std::ostringstream& text = state().calls;
  text << R"(,{"kernel":")" << plan.kernel_name << R"(","splits":)" << plan.splits
       << R"(,"rows_per_tile":)" << plan.rows_per_tile << R"(,"workspace_bytes":)"
       << plan.workspace_bytes << R"(,"read":)" << counted.global_read << R"(,"written":)"
       << counted.global_written << R"(,"launches":)" << counted.launches << R"(,"shared":)"
       << counted.shared << R"(,"tensors":)" << tensors << R"(,"launched":[)";
  const char* comma = "";
  for (const emulator::Launch& launch : emulator::launched()) {
    text << comma << '[' << launch.grid.x << ',' << launch.block.x << ',' << launch.shared_bytes
         << ",\"" << launch.kernel << "\"]";
    comma = ",";
  }
  text << "]}";
}

}  // namespace

void tell_of_memory(Memory what, const void* data, int64_t bytes, int64_t element) {
  if (!data) return;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const auto size = static_cast<size_t>(std::max<int64_t>(bytes, 0));
  if (what == Memory::kNew && size <= emulator::kMostCopied) {
    std::memset(const_cast<void*>(data), emulator::kPoison, size);
  }
  state().memories.add({.begin = begin,
                        .end = begin + size,
                        .is_list = what == Memory::kList,
                        .element = static_cast<size_t>(element)});
}

namespace {

// Strides for four dimensions. Rows stay as they are; the far dimension becomes the outermost.
void spread(const int64_t* sizes, int64_t* strides, int64_t far) {
  constexpr int64_t kFar = (int64_t{1} << 31) + 64;  // elements, of which rows are multiples of 8
  --far;
  if (far < 0 || sizes[far] < 2 || strides[far] == 0) return;
  int64_t extent = (sizes[3] + 7) / 8 * 8;
  for (const int64_t dim : {2, 1, 0}) {
    if (dim == far || strides[dim] == 0) continue;
    strides[dim] = extent;
    extent *= sizes[dim];
  }
  strides[far] = extent + kFar / (sizes[far] - 1) / 8 * 8;
}

}  // namespace

std::vector<int64_t> emulated_strides(const int64_t* sizes, const int64_t* strides, int64_t dims) {
  std::vector<int64_t> found(strides, strides + dims);
  if (dims == 4) spread(sizes, found.data(), state().far_new);
  return found;
}

EmulatedRun::EmulatedRun(const void* args, size_t bytes)
    : image_(
          args, bytes, [](uintptr_t address) { return state().memories.find(address); },
          state().shift, state().misaligned) {
  emulator::settings().at("current") = 0;  // until there is a DeviceGuard
}

void EmulatedRun::run(const void* op, const Plan& plan,
                      const std::function<Plan(const void*)>& planned,
                      const std::function<void(void*)>& run) {
  const Plan blind = planned(image_.blind().front().data());
  if (std::string(blind.kernel_name) != plan.kernel_name || blind.splits != plan.splits ||
      blind.workspace_bytes != plan.workspace_bytes || blind.rows_per_tile != plan.rows_per_tile) {
    emulator::fail("a plan that depends on where the tensors lie");
  }
  emulator::forget_counted();
  if (!state().runs) return log_call(plan, image_.tensors());
  const bool is_kept = !state().folder.empty();
  if (is_kept) image_.keep();
  const emulator::Guarded workspace(plan.workspace_bytes, 0, 0);
  emulator::reseed();
  run(workspace.data());
  workspace.check(plan.kernel_name);
  image_.finish(plan.kernel_name);
  log_call(plan, image_.tensors());
  if (is_kept) {
    image_.keep();
    std::ofstream file(state().folder + "/" + std::to_string(state().files++), std::ios::binary);
    emulator::write_operator(file, op, state().plain);
    image_.write(file);
  }
}

const Backend& backend() { return emulator::cuda_backend(state().plain); }

Machine machine() { return {.threads = 1}; }
Context context(const Device&) { return {.stream = nullptr, .parallel_for = nullptr}; }
int32_t capability_of(const Device&) { return static_cast<int32_t>(emulator::capability()); }
DeviceGuard::DeviceGuard(const Device&) { emulator::settings().at("current") = 1; }
DeviceGuard::~DeviceGuard() = default;

}  // namespace onepass

#define EXPORT extern "C" __attribute__((visibility("default")))

// A setting of the emulator or of the state.
EXPORT void emulated_set(const char* name, int64_t value) {
  onepass::State& state = onepass::state();
  const std::string_view which = name;
  if (which == "shift") {
    state.shift = value;
  } else if (which == "misaligned") {
    state.misaligned = value;
  } else if (which == "far") {
    state.far = value;
  } else if (which == "far_new") {
    state.far_new = value;
  } else if (which == "plain") {
    state.plain = value != 0;
  } else if (which == "run") {
    state.runs = value != 0;
  } else {
    emulator::settings().at(name) = value;
  }
}

// The strides with which an operator gets a tensor of four dimensions.
EXPORT void emulated_spread(const int64_t* sizes, int64_t* strides) {
  onepass::spread(sizes, strides, onepass::state().far);
}

// The folder for files of calls, empty for none.
EXPORT void emulated_keep(const char* folder) {
  onepass::state().folder = folder;
  onepass::state().files = 0;
}

// A call begins.
EXPORT void emulated_begin() { onepass::state().memories.forget(); }

// The calls since the last time, a JSON list.
EXPORT const char* emulated_calls() {
  onepass::State& state = onepass::state();
  const std::string calls = state.calls.str();
  state.calls.str("");
  state.text = "[" + (calls.empty() ? calls : calls.substr(1)) + "]";
  return state.text.c_str();
}

// The names of all kernels, one per line.
EXPORT const char* emulated_kernels() {
  std::string& text = onepass::state().text;
  text.clear();
  for (const std::string& name : emulator::kernels()) text += name + "\n";
  return text.c_str();
}
