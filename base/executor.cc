// SPDX-License-Identifier: Apache-2.0

#include "base/executor.h"
