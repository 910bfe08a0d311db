// The runtime of the tests' library, beside those of csrc/ops: the CUDA back end under the
// emulator, for tensors on the CPU, in the process of the tests. tests/executors.py loads it.
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include "emulator.h"
#include "ops/runtime.h"

extern "C" onepass::Backend onepass_cuda_kernels();

namespace onepass {
namespace {

// What calls may point to. Memory that is freed stays here until something else lies there.
class Memories {
 public:
  void add(uintptr_t begin, uintptr_t end, bool is_list) {
    emulator::KnownMemory memory{begin, end, is_list};
    auto next = by_begin_.upper_bound(begin);
    if (next != by_begin_.begin() && std::prev(next)->second.memory.end > begin) --next;
    while (next != by_begin_.end() && next->first < end) {
      if (next->second.call == call_) {  // a view of the same memory
        memory.begin = std::min(memory.begin, next->second.memory.begin);
        memory.end = std::max(memory.end, next->second.memory.end);
      }
      next = by_begin_.erase(next);
    }
    by_begin_[memory.begin] = {memory, call_};
  }

  const emulator::KnownMemory* find(uintptr_t address) const {
    const auto next = by_begin_.upper_bound(address);
    if (next == by_begin_.begin()) return nullptr;
    const emulator::KnownMemory& memory = std::prev(next)->second.memory;
    return address < memory.end ? &memory : nullptr;
  }

  void next_call() { ++call_; }

 private:
  struct Told {
    emulator::KnownMemory memory;
    int64_t call;
  };
  std::map<uintptr_t, Told> by_begin_;  // apart from one another
  int64_t call_ = 0;
};

struct State {
  Memories memories;
  int64_t shift = 0;        // bytes that tensors begin beyond where they would
  int64_t misaligned = -1;  // the one that does, in the order of the struct's addresses; -1: all
  std::string folder;       // for files of calls; empty: there are none
  int64_t files = 0;
  std::ostringstream calls;  // as JSON, each behind a comma
  std::string text;          // what was handed out last
};

State& state() {
  static auto* const one = new State;
  return *one;
}

void log_call(const Plan& plan) {
  const emulator::Counters& counted = emulator::counters();
  std::ostringstream& text = state().calls;
  text << R"(,{"kernel":")" << plan.kernel_name << R"(","splits":)" << plan.splits
       << R"(,"rows_per_tile":)" << plan.rows_per_tile << R"(,"workspace_bytes":)"
       << plan.workspace_bytes << R"(,"read":)" << counted.global_read << R"(,"written":)"
       << counted.global_written << R"(,"launches":)" << counted.launches << R"(,"shared":)"
       << counted.shared << R"(,"launched":[)";
  const char* comma = "";
  for (const emulator::Launch& launch : emulator::launched()) {
    text << comma << '[' << launch.grid.x << ',' << launch.block.x << ',' << launch.shared_bytes
         << ",\"" << launch.kernel << "\"]";
    comma = ",";
  }
  text << "]}";
}

}  // namespace

void tell_of_memory(Memory what, const void* data, int64_t bytes) {
  if (!data || bytes <= 0) return;
  if (what == Memory::kNew) std::memset(const_cast<void*>(data), emulator::kPoison, bytes);
  const auto begin = reinterpret_cast<uintptr_t>(data);
  state().memories.add(begin, begin + bytes, what == Memory::kList);
}

EmulatedRun::EmulatedRun(const void* args, size_t bytes)
    : image_(
          args, bytes, [](uintptr_t address) { return state().memories.find(address); },
          state().shift, state().misaligned) {}

void EmulatedRun::run(const void* op, const Plan& plan,
                      const std::function<Plan(const void*)>& planned,
                      const std::function<void(void*)>& run) {
  const Plan blind = planned(image_.blind().front().data());
  if (std::string(blind.kernel_name) != plan.kernel_name || blind.splits != plan.splits ||
      blind.workspace_bytes != plan.workspace_bytes || blind.rows_per_tile != plan.rows_per_tile) {
    emulator::fail("a plan that depends on where the tensors lie");
  }
  const bool is_kept = !state().folder.empty();
  if (is_kept) image_.keep();
  const emulator::Guarded workspace(plan.workspace_bytes, 0, 0);
  emulator::forget_counted();
  emulator::reseed();
  run(workspace.data());
  workspace.check(plan.kernel_name);
  image_.finish(plan.kernel_name);
  log_call(plan);
  if (is_kept) {
    image_.keep();
    std::ofstream file(state().folder + "/" + std::to_string(state().files++), std::ios::binary);
    // Where the operator stands in the back end's table: that is all of it that a file needs.
    const int64_t place = static_cast<const char*>(op) - reinterpret_cast<const char*>(&backend());
    file.write(reinterpret_cast<const char*>(&place), sizeof(place));
    image_.write(file);
  }
}

const Backend& backend() {
  static const Backend chosen = onepass_cuda_kernels();
  return chosen;
}

Machine machine() { return {.threads = 1}; }
Context context(const Device&) { return {.stream = nullptr, .parallel_for = nullptr}; }
int32_t capability_of(const Device&) { return kOldestCapability; }
DeviceGuard::DeviceGuard(const Device&) {}
DeviceGuard::~DeviceGuard() = default;

}  // namespace onepass

#define EXPORT extern "C" __attribute__((visibility("default")))

// A setting of the emulator, or `shift` and `misaligned` of an image.
EXPORT void emulated_set(const char* name, int64_t value) {
  onepass::State& state = onepass::state();
  const std::string_view which = name;
  if (which == "shift") {
    state.shift = value;
  } else if (which == "misaligned") {
    state.misaligned = value;
  } else {
    emulator::set(name, value);
  }
}

// The folder for files of calls, empty for none.
EXPORT void emulated_keep(const char* folder) {
  onepass::state().folder = folder;
  onepass::state().files = 0;
}

// A call begins: what was told of in a call before may be gone.
EXPORT void emulated_begin() { onepass::state().memories.next_call(); }

// The calls since the last time, a JSON list.
EXPORT const char* emulated_calls() {
  onepass::State& state = onepass::state();
  const std::string calls = state.calls.str();
  state.calls.str("");
  state.text = "[" + (calls.empty() ? calls : calls.substr(1)) + "]";
  return state.text.c_str();
}

// The names of all kernels that there are, a line each.
EXPORT const char* emulated_kernels() {
  std::string& text = onepass::state().text;
  text.clear();
  for (const std::string& name : emulator::kernels()) text += name + "\n";
  return text.c_str();
}
