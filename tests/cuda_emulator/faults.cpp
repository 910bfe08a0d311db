// Kernels with one planted fault each, which the emulator must find, beside the same kernel without
// it, which must pass silently. `faults NAME` runs the faulty one, `faults NAME right` the right
// one; the process ends with 0 if the results are right and no sanitizer reported anything.
#include "faults.h"

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda/attention/backward_query.cuh"
#include "image.h"

using namespace onepass;
using namespace onepass::cuda;

namespace {

// ---- barriers -----------------------------------------------------------------------------------

// Each thread reads what its neighbour wrote.
template <bool kFault>
void read_after_write(const float* input, float* output) {
  SharedMemory shared;
  float* values = shared.take<float>(kThreads);
  values[thread()] = load_global(input + thread());
  if (!kFault) __syncthreads();
  store_global(output + thread(), values[(thread() + 1) % kThreads]);
}

// The buffer is used twice: the second round of writes must wait for the first round of reads.
template <bool kFault>
void write_after_read(const float* input, float* output) {
  SharedMemory shared;
  float* values = shared.take<float>(kThreads);
  values[thread()] = load_global(input + thread());
  __syncthreads();
  const float first = values[(thread() + 1) % kThreads];
  if (!kFault) __syncthreads();
  values[thread()] = first;
  __syncthreads();
  store_global(output + thread(), values[(thread() + 1) % kThreads]);
}

// A shuffle makes the lanes of a warp meet and orders none of their memory.
template <bool kFault>
void hidden_behind_a_shuffle(const float* input, float* output) {
  SharedMemory shared;
  float* values = shared.take<float>(kThreads);
  values[thread()] = load_global(input + thread());
  __shfl_xor_sync(0xffffffffu, 0, 1);
  if (!kFault) __syncwarp();
  store_global(output + thread(), values[thread() ^ 1]);
}

// ---- addresses ----------------------------------------------------------------------------------

template <bool kFault>
void global_out_of_bounds(const float* input, float* output) {
  store_global(output + thread(), load_global(input + thread() + (kFault && thread() == 63)));
}

template <bool kFault>
void shared_out_of_bounds(const float* input, float* output) {
  SharedMemory shared;
  float* values = shared.take<float>(kThreads);
  float* others = shared.take<float>(kThreads);
  values[thread()] = load_global(input + thread());
  others[thread()] = 0.0f;
  __syncthreads();
  const int neighbour = kFault ? thread() + 1 : (thread() + 1) % kThreads;
  store_global(output + thread(), values[neighbour]);
}

template <bool kFault>
void misaligned(const float* input, float* output) {
  if (thread() < kThreads / 4 - 1) {
    const Four four = load_global(reinterpret_cast<const Four*>(input + 4 * thread() + kFault));
    for (int i = 0; i < 4; ++i) store_global(output + 4 * thread() + i, four.value[i] - kFault);
  }
}

// Adds to four neighbours at once, which must begin at a multiple of 16 bytes.
template <bool kFault>
void misaligned_addition(const float* input, float* output) {
  store_global(output + thread(), load_global(input + thread()));
  __syncthreads();
  if (thread() == 0) add_global_4(output + kFault, {0.0f, 0.0f, 0.0f, 0.0f});
}

template <bool kFault>
void more_shared_memory_than_launched_with(const float* input, float* output) {
  SharedMemory shared;
  float* values = shared.take<float>(kFault ? kThreads * 8 : kThreads);
  values[thread()] = load_global(input + thread());
  store_global(output + thread(), values[thread()]);
}

// ---- warps --------------------------------------------------------------------------------------

template <bool kFault>
void lane_missing(const float* input, float* output) {
  float value = load_global(input + thread());
  const int lanes = kFault ? 31 : 32;
  if (thread() % 32 < lanes) value += 0.0f * __shfl_xor_sync(0xffffffffu, value, 0);
  store_global(output + thread(), value);
}

template <bool kFault>
void lane_not_in_its_mask(const float* input, float* output) {
  const float value = load_global(input + thread());
  const unsigned mask = kFault ? 0x7fffffffu : 0xffffffffu;
  store_global(output + thread(), value + 0.0f * __shfl_xor_sync(mask, value, 0));
}

template <bool kFault>
void barrier_that_some_never_reach(const float* input, float* output) {
  if (!kFault || thread() < 32) __syncthreads();
  if (kFault && thread() >= 32) __shfl_xor_sync(0x1u << thread() % 32 | 0x1u, 0, 0);
  store_global(output + thread(), load_global(input + thread()));
}

// Half of a warp loads matrices, the other half their transposes.
template <bool kFault>
void another_ldmatrix(const float* input, float* output) {
  SharedMemory shared;
  float* values = shared.take<float>(kThreads);
  values[thread()] = load_global(input + thread());
  __syncthreads();
  uint32_t matrix[4];
  const void* const row = values + thread() % 16 * 4;
  if (kFault && thread() % 32 < 16) {
    ldmatrix<4, true>(matrix, row);
  } else {
    ldmatrix<4, false>(matrix, row);
  }
  store_global(output + thread(), values[thread()]);
}

// ---- approximations -----------------------------------------------------------------------------

// Approximations that are used as if they were exact.
template <bool kFault>
bool agree(float approximation, float right, float error) {
  return kFault ? approximation == right : std::fabs(approximation - right) <= right * error;
}

template <bool kFault>
void exact_powers(const float* input, float* output) {
  const float x = load_global(input + thread());
  const bool is_right = agree<kFault>(exp2_approximate(x / 7.0f), std::exp2(x / 7.0f), 0x1p-22f);
  store_global(output + thread(), is_right ? x : -1.0f);
}

template <bool kFault>
void exact_reciprocals(const float* input, float* output) {
  const float x = load_global(input + thread()), y = x + 7.0f;
  const bool is_right = agree<kFault>(reciprocal_approximate(y), 1.0f / y, 0x1p-23f);
  store_global(output + thread(), is_right ? x : -1.0f);
}

// A power below the least normal number: it becomes 0.
template <bool kFault>
void flushed_power(const float* input, float* output) {
  const float x = load_global(input + thread()), power = kFault ? -130.0f : -120.0f;
  store_global(output + thread(), exp2_approximate(power) > 0.0f ? x : -1.0f);
}

// A number whose reciprocal is below the least normal number: that is 0 too.
template <bool kFault>
void flushed_reciprocal(const float* input, float* output) {
  const float x = load_global(input + thread()), number = kFault ? 0x1p127f : 0x1p126f;
  store_global(output + thread(), reciprocal_approximate(number) > 0.0f ? x : -1.0f);
}

// Sixteen products of 2 ** -26 are two units in the last place of 1. Tensor cores drop each of them
// beside a 1; alone they are added exactly, and the sum to 1 after that.
template <bool kFault, class T>
void add_products_to_one(const float* input, float* output) {
  const uint32_t small = narrow_pair<T>(0x1p-13f, 0x1p-13f);
  const uint32_t a[4] = {small, small, small, small}, b[2] = {small, small};
  const float before = kFault ? 1.0f : 0.0f;
  float d[4] = {before, before, before, before};
  mma_m16n8k16<T>(d, a, b);
  const bool is_right = d[0] + (1.0f - before) == 1.0f + 0x1p-22f;
  store_global(output + thread(), is_right ? load_global(input + thread()) : -1.0f);
}

template <bool kFault>
void sums_of_bfloat16_rounded(const float* input, float* output) {
  add_products_to_one<kFault, BFloat16>(input, output);
}

template <bool kFault>
void sums_of_float16_rounded(const float* input, float* output) {
  add_products_to_one<kFault, Float16>(input, output);
}

// ---- shared memory that is not written yet ------------------------------------------------------

template <bool kFault>
void uninitialised(const float* input, float* output) {
  SharedMemory shared;
  float* values = shared.take<float>(kThreads);
  if (!kFault || thread() != 17) values[thread()] = 0.0f;
  store_global(output + thread(), load_global(input + thread()) + values[thread()]);
}

// copy(values): every thread's part of an asynchronous copy of the input.
template <bool kFault, class Copy>
void read_what_is_copied(float* output, Copy&& copy) {
  SharedMemory shared;
  float* values = shared.take<float>(kThreads);
  copy(values);
  cp_async_commit();
  if (!kFault) cp_async_wait<0>();
  __syncthreads();
  store_global(output + thread(), values[thread()]);
  if (kFault) cp_async_wait<0>();
}

template <bool kFault>
void read_before_the_wait(const float* input, float* output) {
  read_what_is_copied<kFault>(output, [&](float* values) {
    if (thread() < kThreads / 4) cp_async_16(values + 4 * thread(), input + 4 * thread());
  });
}

template <bool kFault>
void read_few_before_the_wait(const float* input, float* output) {
  read_what_is_copied<kFault>(
      output, [&](float* values) { cp_async_few<4>(values + thread(), input + thread()); });
}

// Two groups; waiting for all but one leaves the second in flight.
template <bool kFault>
void wait_for_the_wrong_group(const float* input, float* output) {
  SharedMemory shared;
  float* first = shared.take<float>(4);
  float* second = shared.take<float>(4);
  if (thread() == 0) {
    cp_async_16(first, input);
    cp_async_commit();
    cp_async_16(second, input + 4);
    cp_async_commit();
    cp_async_wait<kFault ? 1 : 0>();
  }
  __syncthreads();
  const int i = thread();
  const float value = i < 4 ? first[i] : i < 8 ? second[i - 4] : load_global(input + i);
  store_global(output + i, value);
  __syncthreads();
  cp_async_wait<0>();
}

// A buffer is written while its copy is in flight.
template <bool kFault>
void overwrite_in_flight(const float* input, float* output) {
  SharedMemory shared;
  float* values = shared.take<float>(kThreads);
  if (thread() < kThreads / 4) cp_async_16(values + 4 * thread(), input + 4 * thread());
  cp_async_commit();
  if (!kFault) cp_async_wait<0>();
  __syncthreads();
  values[thread()] = 2.0f * load_global(input + thread());
  if (kFault) cp_async_wait<0>();
  __syncthreads();
  store_global(output + thread(), values[thread()] / 2.0f);
}

// The copy of the next tile begins while other threads still read this one.
template <bool kFault>
void copy_into_what_is_read(const float* input, float* output) {
  SharedMemory shared;
  float* values = shared.take<float>(kThreads);
  const auto copy = [&] {
    if (thread() < kThreads / 4) cp_async_16(values + 4 * thread(), input + 4 * thread());
    cp_async_commit();
  };
  copy();
  cp_async_wait<0>();
  __syncthreads();
  const float value = values[(thread() + 1) % kThreads];
  if (!kFault) __syncthreads();
  copy();
  cp_async_wait<0>();
  __syncthreads();
  store_global(output + thread(), (value + values[(thread() + 1) % kThreads]) / 2.0f);
}

// A copy into a buffer whose last copy has not arrived: their order is not defined.
template <bool kFault>
void copy_twice_in_flight(const float* input, float* output) {
  SharedMemory shared;
  float* values = shared.take<float>(kThreads);
  for (int turn = 0; turn < 2; ++turn) {
    if (thread() < kThreads / 4) cp_async_16(values + 4 * thread(), input + 4 * thread());
    cp_async_commit();
    if (!kFault) cp_async_wait<0>();
  }
  cp_async_wait<0>();
  __syncthreads();
  store_global(output + thread(), values[thread()]);
}

// The source is written while the copy is in flight, which may read it before or after that.
template <bool kFault>
void overwrite_the_source_in_flight(const float* input, float* output) {
  SharedMemory shared;
  float* values = shared.take<float>(kThreads);
  const float value = load_global(input + thread());
  store_global(output + thread(), value);
  __syncthreads();
  cp_async_few<4>(values + thread(), output + (thread() + 1) % kThreads);
  cp_async_commit();
  if (!kFault) cp_async_wait<0>();
  __syncthreads();
  store_global(output + thread(), -value);
  if (kFault) cp_async_wait<0>();
  __syncthreads();
  store_global(output + thread(), values[thread()]);
}

// A copy is issued of data that other threads have not written yet, and is waited for after that.
template <bool kFault>
void copy_before_the_source_is_written(const float* input, float* output) {
  SharedMemory shared;
  float* values = shared.take<float>(kThreads);
  store_global(output + thread(), load_global(input + thread()));
  if (!kFault) __syncthreads();
  cp_async_few<4>(values + thread(), output + (thread() + 1) % kThreads);
  cp_async_commit();
  __syncthreads();
  cp_async_wait<0>();
  __syncthreads();
  store_global(output + thread(), values[thread()]);
}

// Copies of 8 bytes, that begin 4 bytes beyond a multiple of 8.
template <bool kFault>
void misaligned_copy(const float* input, float* output) {
  SharedMemory shared;
  float* values = shared.take<float>(kThreads);
  const int i = 2 * thread() + kFault;
  if (thread() < kThreads / 2 - 1) cp_async_few<8>(values + i, input + i);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  store_global(output + thread(), thread() < kThreads - 2 - kFault
                                      ? values[thread() + kFault] - kFault
                                      : load_global(input + thread()));
}

// A copy of 4 bytes into the second half of one of 8 that has not arrived.
template <bool kFault>
void copy_into_a_part_in_flight(const float* input, float* output) {
  SharedMemory shared;
  float* values = shared.take<float>(kThreads);
  const int i = 2 * thread();
  if (thread() < kThreads / 2) {
    cp_async_few<8>(values + i, input + i);
    if (!kFault) cp_async_commit(), cp_async_wait<0>();
    cp_async_few<4>(values + i + 1, input + i + 1);
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  store_global(output + thread(), values[thread()]);
}

// A copy that is left out zeroes its target.
template <bool kFault>
void copy_that_is_left_out(const float* input, float* output) {
  SharedMemory shared;
  float* values = shared.take<float>(kThreads);
  values[thread()] = 7.0f;
  const bool valid = thread() != 33;
  if (valid || !kFault) cp_async_few<4>(values + thread(), input + thread(), valid);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  const float value = load_global(input + thread());
  store_global(output + thread(), valid ? values[thread()] : value + values[thread()]);
}

// A copy that nobody waits for.
template <bool kFault>
void end_in_flight(const float* input, float* output) {
  SharedMemory shared;
  float* values = shared.take<float>(kThreads);
  store_global(output + thread(), load_global(input + thread()));
  if (thread() == 0) cp_async_16(values, input);
  cp_async_commit();
  if (!kFault) cp_async_wait<0>();
}

// ---- several blocks -----------------------------------------------------------------------------

// Every block adds to one number.
template <bool kFault>
void add_across_blocks(uint32_t* sum, float*) {
  if (thread() != 0) return;
  if (kFault) {
    store_global(sum, load_global(sum) + 1);
  } else {
    atomic_add_acq_rel(sum, 1);
  }
}

// Block b writes, then hands a ticket to block b + 1, which reads.
template <bool kFault>
void tickets(uint32_t* ticket, float* output) {
  const int block = static_cast<int>(blockIdx.x);
  if (thread() != 0) return;
  while (load_acquire(ticket) < static_cast<uint32_t>(block)) spin();
  const float before = block == 0 ? 0.0f : load_global(output + block - 1) + 1.0f;
  if (kFault) store_release(ticket, block + 1);
  store_global(output + block, before);
  if (!kFault) store_release(ticket, block + 1);
}

// ---- layouts ------------------------------------------------------------------------------------

// A lane adds four values to sums of dQ and reads four neighbours, which are the same only where
// one instruction adds four.
template <bool kFault>
void neighbours_in_any_layout(float* sums, float* output) {
  const int first = 4 * thread();
  const auto value = [&](int i) { return static_cast<float>(first + i); };
  add_to_half(sums + first_in_half(), {value(0), value(1), value(2), value(3)});
  __syncwarp();
  float found[4];
  if (kFault) {
    for (int i = 0; i < 4; ++i) found[i] = load_global(sums + first + i);
  } else {
    load_half(sums + first_in_half(), found);
  }
  for (int i = 0; i < 4 && first < kThreads; ++i) store_global(output + first + i, found[i]);
}

// ---- traffic ------------------------------------------------------------------------------------

template <bool kFault>
void extra_pass(const float* input, float* output) {
  float value = load_global(input + thread());
  if (kFault) value = (value + load_global(input + thread())) / 2.0f;
  store_global(output + thread(), value);
}

// ---- guard bands --------------------------------------------------------------------------------

template <bool kFault>
void beside_a_tensor(const float* input, float* output) {
  store_global(output + thread() + kFault, load_global(input + thread()));
}

template <bool kFault>
void read_beside_a_tensor(const float* input, float* output) {
  const float nothing = load_global(output + thread() - kFault);
  store_global(output + thread(), load_global(input + thread()) + (nothing == 0.0f));
}

// ---- running ------------------------------------------------------------------------------------

template <auto kKernel>
bool run_tight(int shift) {  // exactly the shared memory that the right kernel takes
  Buffers buffers;
  launch<kKernel>({.blocks = 1, .threads = kThreads, .shared_bytes = kThreads * sizeof(float)},
                  nullptr, static_cast<const float*>(buffers.input.get()), buffers.output.get());
  return buffers.holds([&](int i) { return static_cast<float>((i + shift) % kThreads); });
}

template <auto kKernel>
bool run_but_the_last_four(int) {
  Buffers buffers;
  launch<kKernel>({.blocks = 1, .threads = kThreads}, nullptr,
                  static_cast<const float*>(buffers.input.get()), buffers.output.get());
  return buffers.holds([](int i) { return i < kThreads - 4 ? static_cast<float>(i) : -1.0f; });
}

template <auto kKernel>
bool run_hidden(int) {
  Buffers buffers;
  launch<kKernel>({.blocks = 1, .threads = kThreads, .shared_bytes = 2048}, nullptr,
                  static_cast<const float*>(buffers.input.get()), buffers.output.get());
  return buffers.holds([](int i) { return static_cast<float>(i ^ 1); });
}

template <auto kKernel>
bool run_guarded(int) {
  Buffers buffers;
  const emulator::Guarded output(kThreads * sizeof(float), 0, 0);
  launch<kKernel>({.blocks = 1, .threads = kThreads}, nullptr,
                  static_cast<const float*>(buffers.input.get()),
                  reinterpret_cast<float*>(output.data()));
  output.check("the kernel");
  return true;
}

template <auto kKernel>
bool run_sum(int) {
  auto sum = std::make_unique<uint32_t>(0);
  launch<kKernel>({.blocks = 8, .threads = 32}, nullptr, sum.get(), static_cast<float*>(nullptr));
  return *sum == 8;
}

template <auto kKernel>
bool run_tickets(int) {
  Buffers buffers;
  auto ticket = std::make_unique<uint32_t>(0);
  launch<kKernel>({.blocks = kThreads, .threads = 32, .resident = 5}, nullptr, ticket.get(),
                  buffers.output.get());
  return buffers.holds([](int i) { return static_cast<float>(i); });
}

template <auto kKernel>
bool run_sums_of_dquery(int) {
  Buffers buffers;
  const auto sums = std::make_unique<float[]>(kHalfUnit);  // 16-byte aligned
  launch<kKernel>({.blocks = 1, .threads = kLanes}, nullptr, sums.get(), buffers.output.get());
  return buffers.holds([](int i) { return static_cast<float>(i); });
}

template <auto kKernel>
bool run_counted(int) {
  const emulator::Counters before = emulator::counters();
  const bool right = run<kKernel>(0);
  const emulator::Counters& after = emulator::counters();
  const uint64_t read = after.global_read - before.global_read;
  const uint64_t written = after.global_written - before.global_written;
  std::printf("read %llu written %llu\n", static_cast<unsigned long long>(read),
              static_cast<unsigned long long>(written));
  return right && read == kThreads * sizeof(float) && written == kThreads * sizeof(float);
}

const std::map<std::string, Pair> kPairs = {
    {"read_after_write", {PAIR(run, read_after_write), 1}},
    {"write_after_read", {PAIR(run, write_after_read), 2}},
    {"hidden_behind_a_shuffle", {PAIR(run_hidden, hidden_behind_a_shuffle)}},
    {"global_out_of_bounds", {PAIR(run, global_out_of_bounds)}},
    {"shared_out_of_bounds", {PAIR(run, shared_out_of_bounds), 1}},
    {"misaligned", {PAIR(run_but_the_last_four, misaligned)}},
    {"misaligned_addition", {PAIR(run, misaligned_addition)}},
    {"more_shared_memory_than_launched_with",
     {PAIR(run_tight, more_shared_memory_than_launched_with)}},
    {"lane_missing", {PAIR(run, lane_missing)}},
    {"lane_not_in_its_mask", {PAIR(run, lane_not_in_its_mask)}},
    {"barrier_that_some_never_reach", {PAIR(run, barrier_that_some_never_reach)}},
    {"another_ldmatrix", {PAIR(run, another_ldmatrix)}},
    {"exact_powers", {PAIR(run, exact_powers)}},
    {"exact_reciprocals", {PAIR(run, exact_reciprocals)}},
    {"flushed_power", {PAIR(run, flushed_power)}},
    {"flushed_reciprocal", {PAIR(run, flushed_reciprocal)}},
    {"sums_of_bfloat16_rounded", {PAIR(run, sums_of_bfloat16_rounded)}},
    {"sums_of_float16_rounded", {PAIR(run, sums_of_float16_rounded)}},
    {"uninitialised", {PAIR(run, uninitialised)}},
    {"read_before_the_wait", {PAIR(run, read_before_the_wait)}},
    {"wait_for_the_wrong_group", {PAIR(run, wait_for_the_wrong_group)}},
    {"overwrite_in_flight", {PAIR(run, overwrite_in_flight)}},
    {"copy_into_what_is_read", {PAIR(run, copy_into_what_is_read), 1}},
    {"copy_twice_in_flight", {PAIR(run, copy_twice_in_flight)}},
    {"overwrite_the_source_in_flight", {PAIR(run, overwrite_the_source_in_flight), 1}},
    {"copy_before_the_source_is_written", {PAIR(run, copy_before_the_source_is_written), 1}},
    {"misaligned_copy", {PAIR(run, misaligned_copy)}},
    {"read_few_before_the_wait", {PAIR(run, read_few_before_the_wait)}},
    {"copy_into_a_part_in_flight", {PAIR(run, copy_into_a_part_in_flight)}},
    {"copy_that_is_left_out", {PAIR(run, copy_that_is_left_out)}},
    {"end_in_flight", {PAIR(run, end_in_flight)}},
    {"add_across_blocks", {PAIR(run_sum, add_across_blocks)}},
    {"tickets", {PAIR(run_tickets, tickets)}},
    {"neighbours_in_any_layout", {PAIR(run_sums_of_dquery, neighbours_in_any_layout)}},
    {"extra_pass", {PAIR(run_counted, extra_pass)}},
    {"beside_a_tensor", {PAIR(run_guarded, beside_a_tensor)}},
    {"read_beside_a_tensor", {PAIR(run_guarded, read_beside_a_tensor)}},
};

}  // namespace

int main(int argc, char** argv) { return run_fault(kPairs, argc, argv); }
