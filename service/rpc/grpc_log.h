// SPDX-License-Identifier: Apache-2.0
//
// gRPC's own complaints and protobuf's, as lines of our log: one per place in their code and ten
// seconds, so that a port scanner or text that is no UTF-8 can't fill a disk. Tested by
// tests/integration/hostile_calls_test.cc.

#pragma once

namespace ebbtide::service {

// For the whole process; before the first use of gRPC.
void SendGrpcLogToOurs();

}  // namespace ebbtide::service
