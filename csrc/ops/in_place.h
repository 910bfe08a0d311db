// Checks of tensors that an operator writes in place: they cannot be replaced by a copy.
#pragma once

#include "ops/check.h"
#include "ops/places.h"

namespace onepass {

// Of a tensor whose dtype is known to be one of ours.
inline Place place_of(const Tensor& tensor) {
  const TensorInfo info = info_of(tensor);
  return {tensor.const_data_ptr(), info, size_of(*dtype_of(info.scalar_type))};
}

// A tensor that is written in place. `verb` says how: "rotated", "updated".
inline void require_own_places(const char* op, const char* name, const TensorInfo& info,
                               const char* verb) {
  require(!has_shared_elements(info), op, ": ", name, " must have a place for each element, it is ",
          verb, " in place, got shape ", info, " with strides ", Shape{info.strides, info.dims});
}

inline void require_dense_rows(const char* op, const char* name, const TensorInfo& info,
                               const char* verb) {
  require(info.sizes[info.dims - 1] <= 1 || info.strides[info.dims - 1] == 1, op, ": ", name,
          " must be dense in its last dimension, it is ", verb, " in place, got strides ",
          Shape{info.strides, info.dims});
}

// A tensor that is read, against one that is written.
inline void require_apart(const char* op, const char* name, const Place& tensor,
                          const char* written_name, const Place& written, const char* verb) {
  require(!share_memory(tensor, written), op, ": ", name, " must lie apart from ", written_name,
          ", which is ", verb, " in place, got shared memory");
}

}  // namespace onepass
