// Kernels whose warps access memory badly, beside the same ones that do not: what counts
// (accesses.h) must tell. `access_faults NAME` runs the bad one, `access_faults NAME right` the
// other; the process ends with 0 if results are right and no access takes more than it must.
#include "accesses.h"
#include "faults.h"

namespace {

// Of a warp: 32 rows of 16 bytes that are written as they lie and read by columns of 8 rows, as
// ldmatrix reads a tile whose rows have 64 bytes. Without the swizzle two rows share banks.
template <bool kFault>
void without_a_swizzle(const float* input, float* output) {
  SharedMemory shared;
  Four* rows = shared.take<Four>(kThreads);
  const int lane = thread() % 32;
  const auto place = [&](int row, int chunk) {
    return row * 4 + (kFault ? chunk : chunk ^ row / 2 % 4);
  };
  if (thread() < 32) {
    rows[place(lane / 4, lane % 4)] = Four{};
    __syncwarp();
    uint32_t matrices[4];
    ldmatrix<4, false>(matrices, rows + place(lane % 8, lane / 8));
  }
  store_global(output + thread(), load_global(input + thread()));
}

// Each lane has two numbers side by side, loads one and then the other: every second of a sector.
template <bool kFault>
void strided_loads(const float* input, float* output) {
  for (int i = 0; i < 2 && thread() < 32; ++i) {
    const int at = kFault ? 2 * thread() + i : 32 * i + thread();
    store_global(output + at, load_global(input + at));
  }
}

// Four neighbours that are added to one after the other, as where there is no vector reduction.
template <bool kFault>
void strided_additions(const float* input, float* output) {
  store_global(output + thread(), load_global(input + thread()));
  for (int i = 0; i < 4 && thread() < 16; ++i) {
    add_global(output + (kFault ? 4 * thread() + i : 16 * i + thread()), 0.0f);
  }
}

// What is written to shared memory as a copy is issued has banks too.
template <bool kFault>
void copies_to_one_bank(const float* input, float* output) {
  SharedMemory shared;
  float* values = shared.take<float>(kThreads * 8);
  const int at = thread() * (kFault ? 8 : 1);
  cp_async_few<4>(values + at, input + thread());
  cp_async_commit();
  cp_async_wait<0>();
  store_global(output + thread(), values[at]);
}

template <auto kKernel>
bool run_at_once(int) {
  const bool right = run<kKernel>(0);
  emulator::print_accesses();
  for (const auto& [kernel, counted] : emulator::accesses()) {
    for (const emulator::Cost& cost : {counted.shared_reads, counted.shared_writes,
                                       counted.global_reads, counted.global_writes}) {
      if (cost.taken != cost.least) return false;
    }
  }
  return right;
}

const std::map<std::string, Pair> kPairs = {
    {"without_a_swizzle", {PAIR(run_at_once, without_a_swizzle)}},
    {"strided_loads", {PAIR(run_at_once, strided_loads)}},
    {"strided_additions", {PAIR(run_at_once, strided_additions)}},
    {"copies_to_one_bank", {PAIR(run_at_once, copies_to_one_bank)}},
};

}  // namespace

int main(int argc, char** argv) { return run_fault(kPairs, argc, argv); }
