// Runs one operator of the CUDA back end on tensors from files: `operators CASE`, see case.h.
#include <algorithm>

#include "case.h"
#include "cuda/backend.h"

namespace onepass {

// A number for each of the rows' dimensions, with commas between them.
static void parse(const std::string& text, RowStride& value) {
  size_t begin = 0;
  for (int64_t& number : value.stride) {
    number = std::stoll(text.substr(begin));
    begin = text.find(',', begin) + 1;
  }
}

namespace {

template <class Args>
void get_rows(const Case& call, Args& args) {
  GET(rows), GET(cols), GET(weight), GET(seed), GET(mean), GET(rstd), GET(weight_dtype);
  GET(weight_offset), GET(dropout_p), GET(rms);
  RowStride size;
  call.get("row_size", size);
  std::copy(size.stride, size.stride + kRowDims, args.row_size);
}

NormForward norm_forward_of(const Case& call) {
  NormForward args{};
  get_rows(call, args);
  GET(input), GET(residual), GET(bias), GET(output), GET(residual_out);
  GET(input_stride), GET(residual_stride), GET(input_dtype), GET(residual_dtype), GET(bias_dtype);
  GET(output_dtype), GET(residual_out_dtype), GET(eps);
  return args;
}

NormBackward norm_backward_of(const Case& call) {
  NormBackward args{};
  get_rows(call, args);
  GET(doutput), GET(dresidual_out), GET(x), GET(dinput), GET(dresidual), GET(dweight), GET(dbias);
  GET(doutput_stride), GET(dresidual_out_stride), GET(x_stride), GET(doutput_dtype), GET(x_dtype);
  GET(dinput_dtype), GET(dresidual_dtype), GET(dweight_dtype), GET(dbias_dtype);
  return args;
}

DropoutForward dropout_forward_of(const Case& call) {
  DropoutForward args{};
  GET(input), GET(residual), GET(seed), GET(output), GET(numel), GET(input_dtype);
  GET(residual_dtype), GET(output_dtype), GET(dropout_p);
  return args;
}

}  // namespace
}  // namespace onepass

int main(int argc, char** argv) {
  using namespace onepass;
  return run_case(argc, argv, [](const Case& call, const std::string& op) {
    if (op == "norm_forward") run(cuda::norm_forward(), norm_forward_of(call));
    if (op == "norm_backward") run(cuda::norm_backward(), norm_backward_of(call));
    if (op == "dropout_forward") run(cuda::dropout_forward(), dropout_forward_of(call));
  });
}
