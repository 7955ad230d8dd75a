// SPDX-License-Identifier: Apache-2.0
//
// What a program takes for granted of the files that it is started with.

#pragma once

namespace ebbtide {

// Opens /dev/null on each of standard input, output and error that is closed: otherwise the next
// file that is opened takes its number, and what is printed lands in there. What is printed to one
// that was closed is an error still. Before any other file is opened.
void OpenStandardFiles();

}  // namespace ebbtide
