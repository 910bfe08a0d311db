// Activations: their numbers, as in the schemas and in Python, and their names.
#pragma once

namespace onepass {

enum class Activation {
  kNone,
  kRelu,
  kSilu,
  kGelu,
  kGeluTanh,
  kSigmoid,
  kRelu2,      // relu(x)^2
  kQuickGelu,  // x sigmoid(1.702 x)
};
inline constexpr int kActivations = 8;
inline constexpr const char* kActivationNames[kActivations] = {
    "", "relu", "silu", "gelu", "gelu_tanh", "sigmoid", "relu2", "quick_gelu"};

constexpr const char* name_of(Activation activation) {
  return kActivationNames[static_cast<int>(activation)];
}

// Calls f<activation>() with an activation other than kNone.
template <class F>
constexpr void visit_activation(Activation activation, F&& f) {
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      return f.template operator()<Activation::kRelu>();
    case Activation::kSilu:
      return f.template operator()<Activation::kSilu>();
    case Activation::kGelu:
      return f.template operator()<Activation::kGelu>();
    case Activation::kGeluTanh:
      return f.template operator()<Activation::kGeluTanh>();
    case Activation::kSigmoid:
      return f.template operator()<Activation::kSigmoid>();
    case Activation::kRelu2:
      return f.template operator()<Activation::kRelu2>();
    case Activation::kQuickGelu:
      return f.template operator()<Activation::kQuickGelu>();
  }
}

}  // namespace onepass
