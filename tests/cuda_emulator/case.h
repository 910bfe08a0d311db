// A case in files and how it is run, for the programs that run operators: `PROGRAM CASE`, a folder
// that tests/emulated_ops.py has written. case.txt has one field of the argument struct per line:
//   NAME value                 a number
//   NAME: BYTES OFFSET         the next tensor in tensors.bin, OFFSET bytes beyond a multiple of 16
//   NAME@ TENSOR BYTES         a view: BYTES behind the beginning of a tensor named before
// The tensors are written back, what was counted to counters.txt, and to kernels.txt the kernels
// that ran: blocks, threads, bytes of shared memory, name. `PROGRAM --kernels` prints the names of
// those that there are.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/backend.h"
#include "core/dtype.h"
#include "emulator.h"

namespace onepass {

inline void parse(const std::string& text, int64_t& value) { value = std::stoll(text); }
inline void parse(const std::string& text, double& value) { value = std::stod(text); }
inline void parse(const std::string& text, bool& value) { value = text == "1"; }
inline void parse(const std::string& text, DType& value) {
  value = static_cast<DType>(std::stoi(text));
}

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
  std::map<std::string, char*> views;
  std::vector<std::string> order;  // of the tensors in the file

  explicit Case(const std::string& path) : folder(path) {
    std::ifstream file(path + "/case.txt");
    std::ifstream data(path + "/tensors.bin", std::ios::binary);
    std::string name;
    while (file >> name) {
      const char kind = name.back();
      if (kind != ':' && kind != '@') {
        file >> values[name];
        continue;
      }
      name.pop_back();
      if (kind == '@') {
        std::string of;
        size_t behind;
        file >> of >> behind;
        views[name] = tensors.at(of).data() + behind;
        continue;
      }
      Tensor& tensor = tensors[name];
      file >> tensor.bytes >> tensor.offset;
      tensor.memory.reset(new char[tensor.offset + tensor.bytes]);
      data.read(tensor.data(), static_cast<std::streamsize>(tensor.bytes));
      order.push_back(name);
    }
  }

  void write_back() const {
    std::ofstream data(folder + "/tensors.bin", std::ios::binary);
    for (const std::string& name : order) {
      const Tensor& tensor = tensors.at(name);
      data.write(tensor.data(), static_cast<std::streamsize>(tensor.bytes));
    }
    const emulator::Counters& counted = emulator::counters();
    count("read", counted.global_read);
    count("written", counted.global_written);
    count("launches", counted.launches);
    count("shared", counted.shared);
    std::ofstream ran(folder + "/kernels.txt");
    for (const emulator::Launch& launch : emulator::launched()) {
      ran << launch.grid.x << " " << launch.block.x << " " << launch.shared_bytes << " "
          << launch.kernel << "\n";
    }
  }

  void count(const char* name, uint64_t value) const {
    std::ofstream(folder + "/counters.txt", std::ios::app) << name << " " << value << "\n";
  }

  template <class T>
  void get(const char* name, T*& pointer) const {
    const auto found = tensors.find(name);
    const auto view = views.find(name);
    char* data = found == tensors.end() ? nullptr : found->second.data();
    if (view != views.end()) data = view->second;
    pointer = reinterpret_cast<T*>(data);
  }
  template <class T>
  void get(const char* name, T& value) const {
    parse(values.at(name), value);
  }
};

// In a function that fills `args` from `call`.
#define GET(field) call.get(#field, args.field)

template <class Args>
void run(const Operator<Args>& op, const Args& args) {
  const Plan plan = op.plan(args, Machine{.threads = 1});
  const std::unique_ptr<char[]> workspace(new char[plan.workspace_bytes]);
  std::fill_n(workspace.get(), plan.workspace_bytes, static_cast<char>(emulator::kPoison));
  const auto print = [](const char* name, int64_t value) {
    std::printf("%s %lld\n", name, static_cast<long long>(value));
  };
  std::printf("kernel %s\n", plan.kernel_name);
  print("splits", plan.splits), print("rows_per_tile", plan.rows_per_tile);
  print("workspace_bytes", plan.workspace_bytes);
  op.run(args, plan, workspace.get(), Context{});
}

// main() of such a program; run_operator(case, op) runs the one of that name.
template <class F>
int run_case(int argc, char** argv, F&& run_operator) {
  if (argc != 2) return 2;
  if (std::string(argv[1]) == "--kernels") {
    for (const std::string& name : emulator::kernels()) std::puts(name.c_str());
    return 0;
  }
  emulator::reseed();
  const Case call(argv[1]);
  run_operator(call, call.values.at("op"));
  call.write_back();
  return 0;
}

}  // namespace onepass
