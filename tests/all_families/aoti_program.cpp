// Runs a package of AOTInductor, made from a swapped model, without Python: argv holds onepass' CPU
// library, the package, a file of the input's floats, and the file for the output's.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  if (dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL) == nullptr) {  // its operators are registered by that
    std::cerr << dlerror() << "\n";
    return 3;
  }
  const int64_t rows = std::atoll(argv[5]);
  torch::Tensor input = torch::empty({2, rows, 64});
  std::ifstream(argv[3], std::ios::binary)
      .read(static_cast<char*>(input.data_ptr()), static_cast<std::streamsize>(input.nbytes()));
  torch::inductor::AOTIModelPackageLoader loader(argv[2]);
  const torch::Tensor output = loader.run({input}).at(0).contiguous();
  std::ofstream(argv[4], std::ios::binary)
      .write(static_cast<const char*>(output.data_ptr()),
             static_cast<std::streamsize>(output.nbytes()));
  return 0;
}
