// Runs one operator of the CUDA back end on tensors from files: `operators CASE`, a folder that
// tests/emulated.py has written. case.txt has one field of the argument struct per line:
//   NAME value                 a number
//   NAME: BYTES OFFSET         a tensor in NAME.bin, whose address is OFFSET beyond a multiple of
//   16
// The tensors are written back, and what was counted to counters.txt.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <string>

#include "cuda/backend.h"
#include "emulator.h"

using namespace onepass;

namespace {

struct Case {
  struct Tensor {
    std::unique_ptr<char[]> memory;  // of exactly its size: red zones begin where it ends
    size_t bytes;
    size_t offset;
    char* data() const { return memory.get() + offset; }
  };
  std::string folder;
  std::map<std::string, std::string> values;
  std::map<std::string, Tensor> tensors;

  explicit Case(const std::string& path) : folder(path) {
    std::ifstream file(path + "/case.txt");
    std::string name;
    while (file >> name) {
      if (name.back() != ':') {
        file >> values[name];
        continue;
      }
      name.pop_back();
      Tensor& tensor = tensors[name];
      file >> tensor.bytes >> tensor.offset;
      tensor.memory.reset(new char[tensor.offset + tensor.bytes]);
      std::ifstream(folder + "/" + name + ".bin", std::ios::binary)
          .read(tensor.data(), static_cast<std::streamsize>(tensor.bytes));
    }
  }

  void write_back() const {
    for (const auto& [name, tensor] : tensors) {
      std::ofstream(folder + "/" + name + ".bin", std::ios::binary)
          .write(tensor.data(), static_cast<std::streamsize>(tensor.bytes));
    }
    const emulator::Counters& counted = emulator::counters();
    std::ofstream(folder + "/counters.txt")
        << "read " << counted.global_read << "\nwritten " << counted.global_written << "\nlaunches "
        << counted.launches << "\n";
  }

  template <class T>
  void get(const char* name, T*& pointer) const {
    const auto found = tensors.find(name);
    pointer = found == tensors.end() ? nullptr : reinterpret_cast<T*>(found->second.data());
  }
  void get(const char* name, int64_t& value) const { value = std::stoll(values.at(name)); }
  void get(const char* name, double& value) const { value = std::stod(values.at(name)); }
  void get(const char* name, bool& value) const { value = values.at(name) == "1"; }
  void get(const char* name, DType& value) const {
    value = static_cast<DType>(std::stoi(values.at(name)));
  }
  // Rows one stride apart.
  void get(const char* name, RowStride& value) const {
    value = {{0, 0, std::stoll(values.at(name))}};
  }
};

#define GET(field) call.get(#field, args.field)

template <class Args>
void get_rows(const Case& call, Args& args) {
  GET(rows), GET(cols), GET(weight), GET(seed), GET(mean), GET(rstd), GET(weight_dtype);
  GET(weight_offset), GET(dropout_p), GET(rms);
  args.row_size[0] = args.row_size[1] = 1;
  args.row_size[2] = args.rows;
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

template <class Args>
void run(const Operator<Args>& op, const Args& args) {
  const Plan plan = op.plan(args, Machine{.threads = 1});
  const std::unique_ptr<char[]> workspace(new char[plan.workspace_bytes]);
  for (int64_t i = 0; i < plan.workspace_bytes; ++i) {
    workspace[i] = static_cast<char>(i < plan.zeroed_bytes ? 0 : emulator::kPoison);
  }
  std::printf("%s %lld\n", plan.kernel_name, static_cast<long long>(plan.splits));
  op.run(args, plan, workspace.get(), Context{});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  if (const char* seed = std::getenv("EMULATOR_SEED")) {
    emulator::set_seed(std::strtoull(seed, nullptr, 10));
  }
  const Case call(argv[1]);
  const std::string& op = call.values.at("op");
  if (op == "norm_forward") run(cuda::norm_forward(), norm_forward_of(call));
  if (op == "norm_backward") run(cuda::norm_backward(), norm_backward_of(call));
  if (op == "dropout_forward") run(cuda::dropout_forward(), dropout_forward_of(call));
  call.write_back();
  return 0;
}
