// One step of an optimizer for all parameters of a model.
//
// A tile of a parameter, its gradient and its states is loaded into L1 as float32, updated there
// and stored, so that every byte crosses the memory bus once each way for all dtypes: AdamW in
// float32 moves 28 bytes per parameter; with bfloat16 parameters, gradients and states and a 16-bit
// remainder 18. Done when it runs at the speed of memory (`onepass bench optimizer`).
#include "core/visit.h"
#include "cpu/optimizer/fused.h"
#include "cpu/optimizer/pieces.h"
#include "cpu/optimizer/tiles.h"
#include "cpu/optimizer/update.h"
#include "cpu/parallel.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

// The working memory of a thread: 6 tiles of 2 KB, the noise, and the tables of codes.
struct Tiles {
  Tile<float> param;
  Tile<float> gradient;
  Tile<float> moments[kMoments];
  Tile<float> average;
  NoiseTile noise;
  MomentCodes codes;
};

// Of 16 bits, which are rounded stochastically.
bool has_narrow_average(const StepTensor& t) { return t.average && size_of(t.average_dtype) == 2; }

float* open_param(const StepTensor& t, int64_t at, int64_t count, Tile<float>& tile) {
  if (t.master_kind == Master::kFloat32) return static_cast<float*>(t.master) + at;
  if (t.param_dtype == DType::kFloat32) return static_cast<float*>(t.param) + at;
  if (t.master_kind == Master::kRemainder) {
    join_block(static_cast<const BFloat16*>(t.param) + at,
               static_cast<const uint16_t*>(t.master) + at, tile.values, count);
  } else {
    visit_dtype_up_to_float32(t.param_dtype, [&]<class T>() {
      widen_block(static_cast<const T*>(t.param) + at, tile.values, count);
    });
  }
  return tile.values;
}

void close_param(const StepTensor& t, int64_t at, int64_t count, const float* values,
                 const NoiseTile& noise) {
  visit_dtype_up_to_float32(t.param_dtype, [&]<class T>() {
    if constexpr (sizeof(T) == 2) {
      T* const param = static_cast<T*>(t.param) + at;
      switch (t.master_kind) {
        case Master::kNone:
          narrow_block(values, param, count);
          break;
        case Master::kFloat32:
          round_block(values, param, count, TiesAway{});
          break;
        case Master::kStochastic:
          round_block(values, param, count, Stochastic<NoiseHalf::kLow>{noise});
          break;
        case Master::kRemainder:
          split_block(values, static_cast<BFloat16*>(t.param) + at,
                      static_cast<uint16_t*>(t.master) + at, count);
      }
    }
  });
}

const float* open_gradient(const StepTensor& t, int64_t at, int64_t count, Tile<float>& tile) {
  if (t.gradient_dtype == DType::kFloat32) return static_cast<const float*>(t.gradient) + at;
  visit_dtype_up_to_float32(t.gradient_dtype, [&]<class T>() {
    widen_block(static_cast<const T*>(t.gradient) + at, tile.values, count);
  });
  return tile.values;
}

float* open_average(const StepTensor& t, int64_t at, int64_t count, Tile<float>& tile) {
  if (!t.average) return nullptr;
  if (t.average_dtype == DType::kFloat32) return static_cast<float*>(t.average) + at;
  visit_dtype_up_to_float32(t.average_dtype, [&]<class T>() {
    widen_block(static_cast<const T*>(t.average) + at, tile.values, count);
  });
  return tile.values;
}

void close_average(const StepTensor& t, int64_t at, int64_t count, const float* values,
                   const NoiseTile& noise) {
  if (!has_narrow_average(t)) return;
  visit_dtype_up_to_float32(t.average_dtype, [&]<class T>() {
    if constexpr (sizeof(T) == 2) {
      round_block(values, static_cast<T*>(t.average) + at, count,
                  Stochastic<NoiseHalf::kLow>{noise});
    }
  });
}

// The number of the second moment, which is never negative.
constexpr int kSecondMoment = 1;

float* open_moment(const StepTensor& t, int which, int64_t at, int64_t count, Tiles& tiles) {
  void* const moment = t.moments[which];
  float* const to = tiles.moments[which].values;
  switch (t.moment_type) {
    case MomentType::kBFloat16:
    case MomentType::kBFloat16Stochastic:
      widen_block(static_cast<const BFloat16*>(moment) + at, to, count);
      return to;
    case MomentType::kFloat16:
      widen_block(static_cast<const Float16*>(moment) + at, to, count);
      return to;
    case MomentType::kInt8:
      visit_bool(which < kSecondMoment, [&]<bool kSigned>() {
        decode_blocks<kSigned>(tiles.codes, static_cast<const uint8_t*>(moment) + at,
                               t.scales[which] + at / kCodeBlock, to, count);
      });
      return to;
    default:
      return static_cast<float*>(moment) + at;
  }
}

// element: the first one's number within the stretch of the noise.
void close_moment(const StepTensor& t, int which, int64_t at, int64_t count, const float* values,
                  const Noise& noise, uint32_t element, const Tiles& tiles) {
  void* const moment = t.moments[which];
  switch (t.moment_type) {
    case MomentType::kBFloat16:
    case MomentType::kBFloat16Stochastic: {
      BFloat16* const to = static_cast<BFloat16*>(moment) + at;
      if (t.moment_type == MomentType::kBFloat16Stochastic && which == kSecondMoment) {
        round_block(values, to, count, Stochastic<NoiseHalf::kHigh>{tiles.noise});
      } else {
        narrow_block(values, to, count);
      }
      break;
    }
    case MomentType::kFloat16:
      narrow_block(values, static_cast<Float16*>(moment) + at, count);
      break;
    case MomentType::kInt8: {
      uint8_t* const codes = static_cast<uint8_t*>(moment) + at;
      float* const scales = t.scales[which] + at / kCodeBlock;
      if (which < kSecondMoment) {
        encode_blocks<true>(tiles.codes, values, codes, scales, count, NearestCode{});
      } else if (which == kSecondMoment) {
        encode_blocks<false>(tiles.codes, values, codes, scales, count,
                             StochasticCode(noise, element));
      } else {
        encode_blocks<false>(tiles.codes, values, codes, scales, count, NearestCode{});
      }
      break;
    }
    default:
      break;
  }
}

// Whether the tensor is float64, with everything that belongs to it.
bool is_wide(const StepTensor& t) { return t.param_dtype == DType::kFloat64; }

void step_wide_piece(const OptimizerStep& args, const StepTensor& t, int64_t first, int64_t count) {
  Operands<double> on{
      static_cast<double*>(t.param) + first, static_cast<const double*>(t.gradient) + first, {}};
  for (int which = 0; which < kMoments; ++which) {
    if (t.moments[which]) on.moments[which] = static_cast<double*>(t.moments[which]) + first;
  }
  double* const average = t.average ? static_cast<double*>(t.average) + first : nullptr;
  update_block(args.algorithm, on, average, count, args.scalars[t.scalars], args.gradient_factor);
}

bool is_in_place(const StepTensor& t) {
  return t.param_dtype == DType::kFloat32 && t.gradient_dtype == DType::kFloat32 &&
         t.moment_type == MomentType::kFloat32 && !has_narrow_average(t);
}

Noise noise_of(const OptimizerStep& args, const StepTensor& t, int64_t first) {
  return make_noise(args.seed, args.scalars[t.scalars].step, static_cast<uint32_t>(t.index),
                    first / kNoiseStretch);
}

// Whether it is AdamW with its usual settings, for which fused.h is written.
bool is_usual_adam(const OptimizerStep& args, const StepScalars& scalars) {
  return args.algorithm == Algorithm::kAdam && !scalars.amsgrad && scalars.gradient_decay == 0.0 &&
         is_near(scalars);
}

// Returns whether the tensor is of a kind that needs no tiles, and was updated.
bool step_fused_piece(const OptimizerStep& args, const StepTensor& t, int64_t first,
                      int64_t count) {
  const StepScalars& scalars = args.scalars[t.scalars];
  if (!is_usual_adam(args, scalars) || has_narrow_average(t)) return false;
  return visit_fused(t, [&]<Master kMaster, bool kWideGradient, MomentType kMomentType>() {
    const int64_t moment_size = kMomentType == MomentType::kFloat32 ? 4 : 2;
    const int64_t master_size = kMaster == Master::kFloat32 ? 4 : 2;
    FusedOperands<kMaster, kWideGradient, kMomentType> on{
        .param = static_cast<BFloat16*>(t.param) + first,
        .master = static_cast<char*>(t.master) + first * master_size,
        .gradient = static_cast<const char*>(t.gradient) + first * (kWideGradient ? 4 : 2),
        .moments = {static_cast<char*>(t.moments[0]) + first * moment_size,
                    static_cast<char*>(t.moments[1]) + first * moment_size},
        .noise_start = {},
        .noise_stride = 0};
    const Noise noise = on.kNoisy ? noise_of(args, t, first) : Noise{};
    on.noise_start = noise_lanes(noise, 0);
    on.noise_stride = noise.stride;
    const float factor = static_cast<float>(args.gradient_factor * scalars.gradient_sign);
    if (t.average) {
      const Averaged<float, decltype(on)> averaged{on, static_cast<float*>(t.average) + first,
                                                   Average<float>(scalars.ema_weight)};
      adam_block<float, false, false, true>(averaged, 0, count, scalars, factor);
      return;
    }
    int64_t done = 0;
    if constexpr (!kWideGradient && kMaster != Master::kFloat32 &&
                  kMomentType != MomentType::kFloat32) {
      done = adam_pairs(on, count, noise, scalars, factor);
    }
    adam_block<float, false, false, true>(on, done, count, scalars, factor);
  });
}

// The update of a tile whose moments are codes. average: of the parameter, or null.
void step_codes(const StepTensor& t, int64_t at, int64_t count, const Operands<float>& on,
                float* average, const StepScalars& s, float gradient_factor,
                StochasticCode rounding, Tiles& tiles) {
  uint8_t* const codes[] = {static_cast<uint8_t*>(t.moments[0]) + at,
                            static_cast<uint8_t*>(t.moments[1]) + at};
  NearestCode nearest;
  for (int64_t block = 0; block < count; block += kCodeBlock) {
    float* const scales[] = {t.scales[0] + (at + block) / kCodeBlock,
                             t.scales[1] + (at + block) / kCodeBlock};
    float* const first = tiles.moments[0].values;
    float* const second = tiles.moments[1].values;
    const CodedOperands coded{{on.param + block, on.gradient + block, {first, second}},
                              {codes[0] + block, codes[1] + block},
                              {broadcast<float>(*scales[0]), broadcast<float>(*scales[1])},
                              tiles.codes,
                              {}};
    const auto update = [&](const auto& operands) -> CodedOperands {
      return adam_block<float, false, false, true>(operands, 0, kCodeBlock, s, gradient_factor);
    };
    const CodedOperands done = average ? update(Averaged<float, CodedOperands>{
                                             coded, average + block, Average<float>(s.ema_weight)})
                                       : update(coded);
    *scales[0] = done.largest[0].value();
    *scales[1] = done.largest[1].value();
    encode_block<true>(tiles.codes, first, codes[0] + block, *scales[0], nearest);
    encode_block<false>(tiles.codes, second, codes[1] + block, *scales[1], rounding);
  }
}

void step_piece(const OptimizerStep& args, const StepTensor& t, int64_t first, int64_t count,
                Tiles& tiles) {
  const StepScalars& scalars = args.scalars[t.scalars];
  const bool codes = t.moment_type == MomentType::kInt8;
  const bool coded_adam = codes && is_usual_adam(args, scalars);
  const bool fills_noise =
      t.master_kind == Master::kStochastic || has_narrow_average(t) ||
      (t.moments[kSecondMoment] && t.moment_type == MomentType::kBFloat16Stochastic);
  const Noise noise = fills_noise || codes ? noise_of(args, t, first) : Noise{};
  // If no operand goes through tiles, the loop need not stop at their ends: that makes a float32
  // step 7 % faster (8 x 2M, AVX-512).
  const int64_t tile = is_in_place(t) ? kPieceElements : kTile;
  for (int64_t done = 0; done < count; done += tile) {
    const int64_t at = first + done;
    const int64_t n = std::min(tile, count - done);
    const uint32_t element = static_cast<uint32_t>(done);
    Operands<float> on{
        open_param(t, at, n, tiles.param), open_gradient(t, at, n, tiles.gradient), {}};
    float* const average = open_average(t, at, n, tiles.average);
    if (coded_adam) {
      const float factor = static_cast<float>(args.gradient_factor * scalars.gradient_sign);
      step_codes(t, at, n, on, average, scalars, factor, StochasticCode(noise, element), tiles);
    } else {
      for (int which = 0; which < kMoments; ++which) {
        if (t.moments[which]) on.moments[which] = open_moment(t, which, at, n, tiles);
      }
      update_block(args.algorithm, on, average, n, scalars, args.gradient_factor);
    }
    if (fills_noise) tiles.noise.fill(noise, element, n);
    close_param(t, at, n, on.param, tiles.noise);
    close_average(t, at, n, tiles.average.values, tiles.noise);
    for (int which = 0; which < kMoments; ++which) {
      if (on.moments[which]) {
        close_moment(t, which, at, n, on.moments[which], noise, element, tiles);
      }
    }
  }
}

void optimizer_step_kernel(const OptimizerStep& args, int64_t begin, int64_t end) {
  Tiles tiles;
  for_each_in_pieces(args.list, begin, end,
                     [&](const StepTensor& t, int64_t first, int64_t count, int64_t) {
                       if (!args.is_made) {
                         // nothing but the gradient changes
                       } else if (is_wide(t)) {
                         step_wide_piece(args, t, first, count);
                       } else if (!step_fused_piece(args, t, first, count)) {
                         step_piece(args, t, first, count, tiles);
                       }
                       if (args.zero_gradients) {
                         const int64_t size = size_of(t.gradient_dtype);
                         std::memset(static_cast<char*>(t.gradient) + first * size, 0,
                                     static_cast<size_t>(count * size));
                       }
                     });
}

Plan plan_step(const OptimizerStep& args, const Machine& machine) {
  // Parameter and two moments, read and written, and the gradient: of float32 28 bytes.
  return plan_pieces(args.list, machine, "optimizer_step_kernel", 0,
                     [](const StepTensor&) { return int64_t{28}; });
}

void run_step(const OptimizerStep& args, const Plan& plan, void*, const Context& context) {
  for_each_piece(context, plan.threads, plan.splits,
                 [&](int64_t begin, int64_t end) { optimizer_step_kernel(args, begin, end); });
}

}  // namespace

Operator<OptimizerStep> optimizer_step() { return {plan_step, run_step}; }

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
