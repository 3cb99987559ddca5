#include "pool.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/MemoryFormat.h>

#include <array>
#include <cstdlib>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "spinlock.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace convoy {

namespace {

constexpr size_t kLargePage = 2 << 20, kSlab = 32 << 20;
constexpr size_t kLine = 64;
constexpr size_t kShelves = 64;

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// Sizes differ by an eighth at most, so that batches of many sizes share their pieces. A line more:
// pieces of a power of two would all fall on the same cache sets.
size_t size_of_piece(size_t bytes) {
  size_t power = kLine;
  while (2 * power <= bytes) power *= 2;
  return round_up(std::max<size_t>(bytes, 1), std::max(kLine, power / 8)) + kLine;
}

// Pieces that a thread has given back, by size.
struct Shelf {
  SpinLock lock;
  std::unordered_map<size_t, std::vector<char*>> pieces;

  char* take(size_t bytes) {
    std::lock_guard<SpinLock> held(lock);
    auto found = pieces.find(bytes);
    if (found == pieces.end() || found->second.empty()) return nullptr;
    char* piece = found->second.back();
    found->second.pop_back();
    return piece;
  }

  void put(size_t bytes, char* piece) {
    std::lock_guard<SpinLock> held(lock);
    pieces[bytes].push_back(piece);
  }
};

class Pool {
 public:
  // Never destroyed: tensors may outlive everything else.
  static Pool& of_process() {
    static Pool* pool = new Pool();
    return *pool;
  }

  char* take(size_t bytes) {
    size_t mine = shelf();
    for (size_t i = 0; i < kShelves; ++i)
      if (char* piece = shelves_[(mine + i) % kShelves].take(bytes)) return piece;
    return carve(bytes);
  }

  void put(size_t bytes, char* piece) { shelves_[shelf()].put(bytes, piece); }

 private:
  static size_t shelf() {
    static std::atomic<size_t> threads{0};
    static thread_local size_t mine = threads++ % kShelves;
    return mine;
  }

  // Cut a new piece off a slab. What a slab has left when it is too short is never used.
  char* carve(size_t bytes) {
    std::lock_guard<SpinLock> held(lock_);
    if (bytes > left_) {
      size_t size = round_up(std::max(bytes, kSlab), kLargePage);
      next_ = static_cast<char*>(std::aligned_alloc(kLargePage, size));
      if (!next_) throw std::bad_alloc();
#ifdef __linux__
      madvise(next_, size, MADV_HUGEPAGE);  // a wish: without it all works as well, but slower
#endif
      left_ = size;
    }
    char* piece = next_;
    next_ += bytes;
    left_ -= bytes;
    return piece;
  }

  std::array<Shelf, kShelves> shelves_;
  SpinLock lock_;
  char* next_ = nullptr;
  size_t left_ = 0;
};

at::Tensor made(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type) {
  size_t bytes = c10::elementSize(type);
  for (auto size : sizes) bytes *= size;
  bytes = size_of_piece(bytes);
  char* piece = Pool::of_process().take(bytes);
  auto give_back = [bytes](void* data) {
    Pool::of_process().put(bytes, static_cast<char*>(data));
  };
  return at::from_blob(piece, sizes, strides, give_back, at::TensorOptions().dtype(type));
}

}  // namespace

at::Tensor pooled(at::IntArrayRef sizes, at::ScalarType type) {
  if (sizes.size() == 4) return made(sizes, c10::get_channels_last_strides_2d(sizes), type);
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  return made(sizes, strides, type);
}

at::Tensor pooled_like(const at::Tensor& other) {
  return made(other.sizes(), other.strides(), other.scalar_type());
}

}  // namespace convoy
