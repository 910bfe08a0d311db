#include <atomic>
#include <deque>
#include <mutex>

#include "ops/runtime.h"

namespace onepass {
namespace {

constexpr size_t kMaxRecords = 4096;  // beyond it the oldest are dropped

std::atomic<bool> on{false};
std::mutex mutex;
std::deque<Dispatch> records;

}  // namespace

bool recording() { return on.load(std::memory_order_relaxed); }

void set_recording(bool value) { on.store(value, std::memory_order_relaxed); }

void record(Dispatch dispatch) {
  const std::lock_guard lock(mutex);
  if (records.size() == kMaxRecords) records.pop_front();
  records.push_back(std::move(dispatch));
}

std::vector<Dispatch> take_recorded() {
  const std::lock_guard lock(mutex);
  std::vector<Dispatch> taken(std::make_move_iterator(records.begin()),
                              std::make_move_iterator(records.end()));
  records.clear();
  return taken;
}

}  // namespace onepass
