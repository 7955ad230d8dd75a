// SPDX-License-Identifier: Apache-2.0
//
// What each operation reads and writes: replaces the arrays that its args name by ones that the
// device reaches. Args are checked before, since their sizes say how much is copied.
// Tested by tests/unit/gpu/backend_test.cc and the contracts' own tests.

#pragma once

#include <cstddef>

#include "gpu/backend.h"
#include "gpu/cuda/carried_arrays.h"

namespace ebbtide::gpu {

// What AttendCuda reads keys and values once for.
inline constexpr size_t kAttendRowsAtOnce = 8;

inline void Bring(AppendArgs& args, CarriedArrays& arrays) {
  CheckAppend(args);
  const size_t row_bytes = RowBytes(args.dtype, args.head_dim);
  const auto tokens = static_cast<size_t>(args.tokens);
  size_t stride = args.stride;
  arrays.InRows(args.key, tokens, row_bytes, stride);
  arrays.InRows(args.value, tokens, row_bytes, args.stride);
  EBBTIDE_CHECK(stride == args.stride || tokens == 0,
                "append: keys and values lie in device memory both or neither");
  arrays.Out(args.key_slot, row_bytes);
  arrays.Out(args.value_slot, row_bytes);
  arrays.Out(args.key_norm);
  arrays.Out(args.value_norm);
}

inline void Bring(AttendArgs& args, CarriedArrays& arrays) {
  CheckAttend(args);
  arrays.In(args.extents, ExtentPart::kKeysAndValues, RowBytes(args.dtype, args.head_dim),
            args.lse.size() <= kAttendRowsAtOnce ? Reads::kOnce : Reads::kOften);
  arrays.In(args.query);
  arrays.In(args.query_index);
  arrays.Out(args.output);
  arrays.Out(args.lse);
  arrays.Out(args.logits);
  arrays.Out(args.part_output);
  arrays.Out(args.part_lse);
}

inline void Bring(BoundArgs& args, CarriedArrays& arrays) {
  CheckBound(args);
  arrays.In(args.query);
  arrays.In(args.digest, DigestBytes(args.head_dim));
  arrays.In(args.absent);
  arrays.In(args.resident_logit_sum);
  arrays.In(args.resident_logit_error);
  arrays.Out(args.mass_low);
  arrays.Out(args.mass_high);
  arrays.Out(args.mass_estimate);
}

inline void Bring(CodeErrorArgs& args, CarriedArrays& arrays) {
  CheckCodeErrors(args);
  arrays.In(args.query);
  arrays.In(args.digest);
  arrays.In(args.coarse);
  arrays.Out(args.logit_error);
  arrays.Out(args.logit_error_joint);
  arrays.Out(args.logit_deviation);
  arrays.Out(args.key_error);
  arrays.Out(args.value_error);
  arrays.Out(args.value_error_joint);
  arrays.Out(args.value_deviation);
}

inline void Bring(DamageArgs& args, CarriedArrays& arrays) {
  CheckDamage(args);
  arrays.In(args.extents, ExtentPart::kValues, RowBytes(args.dtype, args.head_dim));
  arrays.In(args.logits);
  arrays.In(args.lse);
  arrays.In(args.centre);
  arrays.In(args.rest_output);
  arrays.In(args.rest_lse);
  arrays.Out(args.damage);
}

inline void Bring(DecodeArgs& args, CarriedArrays& arrays) {
  CheckDecode(args);
  arrays.In(args.digest);
  arrays.In(args.coarse);
  arrays.In(args.fine);
  arrays.Out(args.page);
}

inline void Bring(DigestArgs& args, CarriedArrays& arrays) {
  CheckDigest(args);
  arrays.In(args.page);
  arrays.Out(args.digest);
}

inline void Bring(EncodeArgs& args, CarriedArrays& arrays) {
  CheckEncode(args);
  arrays.In(args.page);
  arrays.In(args.digest);
  arrays.Out(args.coarse);
  arrays.Out(args.fine);
}

inline void Bring(GatherArgs& args, CarriedArrays& arrays) {
  CheckGather(args);
  arrays.In(args.key_slot, args.shape.row_bytes());
  arrays.In(args.value_slot, args.shape.row_bytes());
  arrays.Out(args.page);
}

inline void Bring(GeometryArgs& args, CarriedArrays& arrays) {
  CheckGeometry(args);
  arrays.In(args.extents, ExtentPart::kKeys, RowBytes(args.dtype, args.head_dim));
  arrays.Out(args.score);
}

inline void Bring(MassArgs& args, CarriedArrays& arrays) {
  CheckMass(args);
  arrays.In(args.logits);
  arrays.In(args.lse);
  arrays.InOut(args.mass);
}

inline void Bring(MergeArgs& args, CarriedArrays& arrays) {
  CheckMerge(args);
  arrays.In(args.part_output);
  arrays.In(args.part_lse);
  arrays.InOut(args.output);
  arrays.InOut(args.lse);
}

inline void Bring(PageDamageArgs& args, CarriedArrays& arrays) {
  CheckPageDamage(args);
  arrays.In(args.part_output);
  arrays.In(args.part_lse);
  arrays.In(args.output);
  arrays.In(args.lse);
  arrays.In(args.rest_output);
  arrays.In(args.rest_lse);
  arrays.Out(args.damage);
}

inline void Bring(ValueDistanceArgs& args, CarriedArrays& arrays) {
  CheckValueDistance(args);
  arrays.In(args.output);
  arrays.In(args.digest, DigestBytes(args.head_dim));
  arrays.Out(args.distance);
}

inline void Bring(WeightedValueArgs& args, CarriedArrays& arrays) {
  CheckWeightedValue(args);
  arrays.In(args.extents, ExtentPart::kValues, RowBytes(args.dtype, args.head_dim));
  arrays.In(args.weight);
  arrays.Out(args.output);
}

inline void Bring(WindowArgs& args, CarriedArrays& arrays) {
  CheckWindow(args);
  arrays.In(args.extents, ExtentPart::kKeys, RowBytes(args.dtype, args.head_dim));
  arrays.In(args.query);
  arrays.In(args.query_index);
  arrays.Out(args.mass);
}

inline void Bring(ZeroArgs& args, CarriedArrays& arrays) {
  arrays.Out(args.bytes);
}

}  // namespace ebbtide::gpu
