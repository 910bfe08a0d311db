#include "cpu/kernels.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

Operator<DeltaRuleUpdate> delta_rule_update() {
  return {[](const DeltaRuleUpdate&, const Machine&) { return Plan{0, "stub", 1, 1, "stub"}; },
          [](const DeltaRuleUpdate&, const Plan&, void*, const Context&) {}};
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
