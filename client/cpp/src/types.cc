// SPDX-License-Identifier: Apache-2.0
//
// Names and sizes of the client's words.

#include "ebbtide/types.h"

namespace ebbtide::client {

size_t DtypeBytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32:
      return 4;
    case Dtype::kF16:
    case Dtype::kBF16:
      return 2;
    case Dtype::kUnspecified:
      break;
  }
  return 0;
}

std::string_view DtypeName(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32:
      return "f32";
    case Dtype::kF16:
      return "f16";
    case Dtype::kBF16:
      return "bf16";
    case Dtype::kUnspecified:
      break;
  }
  return "unspecified";
}

std::string_view TierName(Tier tier) {
  switch (tier) {
    case Tier::kDevice:
      return "device";
    case Tier::kHost:
      return "host";
    case Tier::kRocksdb:
      return "rocksdb";
    case Tier::kUnspecified:
      break;
  }
  return "unspecified";
}

std::span<const float> Tensor::f32() const {
  if (dtype != Dtype::kF32) return {};
  return {reinterpret_cast<const float*>(bytes.data()), bytes.size() / sizeof(float)};
}

}  // namespace ebbtide::client
