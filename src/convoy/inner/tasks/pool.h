// Memory for what the tasks of a step make: kept from step to step, in large pages.
//
// A step asks for the same sizes each time, so a piece that was given back fits the next who asks.
// A thread gets back first what it gave back last, which still lies in its cache. Without this
// each step would have its pages mapped, zeroed and looked up one by one.

#pragma once

#include <ATen/core/Tensor.h>

namespace convoy {

// Return a tensor of this shape, as empty as at::empty's; of four dimensions, channels last.
at::Tensor pooled(at::IntArrayRef sizes, at::ScalarType type);

// As pooled, with the shape and the order of dimensions of another one; it must be dense.
at::Tensor pooled_like(const at::Tensor& other);

}  // namespace convoy
