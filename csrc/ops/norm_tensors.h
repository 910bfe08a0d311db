// The tensors of a norm's call: rows, and the scales of a modulated one.
#pragma once

#include <algorithm>
#include <vector>

#include "ops/check.h"
#include "ops/fields.h"
#include "ops/norm.h"
#include "ops/rows.h"

namespace onepass {

inline RowTensor row_tensor(const char* op, const char* name, const OptionalTensor& tensor) {
  RowTensor rows{tensor};
  if (tensor) rows.info = input_of(op, name, *tensor);
  return rows;
}

// scale, shift and gate, all of one shape: each of their rows serves a group of input's rows.
struct Scales {
  RowTensor scale;
  RowTensor shift;
  RowTensor gate;
  DType scale_dtype{};
  DType shift_dtype{};
  DType gate_dtype{};
  int64_t groups = 1;

  // `shared`: the arguments have a weight, and a bias, for all rows.
  template <class Args>
  void put_into(Args& args, int64_t row_dims, bool shared) {
    args.groups = groups;
    args.tokens = groups > 0 ? args.rows / groups : 0;
    address_rows({&scale, &shift, &gate}, row_dims, args.group_size);
    args.gate = gate.data();
    args.gate_dtype = gate_dtype;
    args.gate_stride = gate.stride;
    if (shared) return;
    args.weight = scale.data();
    args.weight_dtype = scale_dtype;
    args.scale_stride = scale.stride;
  }
};

// `name` of the shape `shape`, whose first dimension is the batch.
template <class Options>
Scales check_scales(const char* op, const char* name, const TensorInfo& shape,
                    const Options& options) {
  const CheckedAgainst checked(op, name, shape);
  const int64_t row_dims = static_cast<int64_t>(options.normalized_shape.size());
  const int64_t leading = shape.dims - row_dims;
  Scales scales{.scale = row_tensor(op, "scale", options.scale),
                .shift = row_tensor(op, "shift", options.shift),
                .gate = row_tensor(op, "gate", options.gate)};
  const TensorInfo& scale = scales.scale.info;
  // One for each row, or for each of the first dimension, with the others as 1 or left out.
  std::vector<int64_t> each(shape.sizes, shape.sizes + shape.dims);
  std::vector<int64_t> ones = each, first = each;
  if (leading > 1) {
    std::fill(ones.begin() + 1, ones.begin() + leading, 1);
    first.erase(first.begin() + 1, first.begin() + leading);
  }
  const auto is_shaped = [&](const std::vector<int64_t>& sizes) {
    return std::equal(sizes.begin(), sizes.end(), scale.sizes, scale.sizes + scale.dims);
  };
  const auto text_of = [](const std::vector<int64_t>& sizes) {
    return Shape{sizes.data(), static_cast<int64_t>(sizes.size())};
  };
  const bool is_each = is_shaped(each);
  if (leading > 1) {
    require(is_each || is_shaped(ones) || is_shaped(first), op, ": scale must have shape ",
            text_of(first), ", ", text_of(ones), " or ", text_of(each), ", got ", shape_of(scale));
  }
  scales.scale_dtype = checked.tensor("scale", scale, leading > 1 ? scale.sizes : shape.sizes,
                                      leading > 1 ? scale.dims : shape.dims);
  scales.shift_dtype = scales.gate_dtype = scales.scale_dtype;
  if (options.shift) {
    scales.shift_dtype = checked.tensor("shift", scales.shift.info, scale.sizes, scale.dims);
  }
  if (options.gate) {
    scales.gate_dtype = checked.tensor("gate", scales.gate.info, scale.sizes, scale.dims);
  }
  for (int64_t d = 0; d < (is_each ? leading : 1); ++d) scales.groups *= shape.sizes[d];
  return scales;
}

}  // namespace onepass
