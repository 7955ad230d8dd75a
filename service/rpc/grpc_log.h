// SPDX-License-Identifier: Apache-2.0
//
// gRPC's own complaints, as lines of our log: one per place in its code and ten seconds, so that a
// port scanner can't fill a disk.

#pragma once

namespace ebbtide::service {

// For the whole process; before the first use of gRPC.
void SendGrpcLogToOurs();

}  // namespace ebbtide::service
