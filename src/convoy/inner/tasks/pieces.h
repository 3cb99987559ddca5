// Work in pieces, of which threads that have nothing else to do take some.
//
// A step waits again and again for the slowest of its groups, for a batch-norm needs all of them,
// and cores are never equally fast: some share their hardware, others are lent out. So a task
// offers what it does in pieces, and whoever is idle helps. Which pieces there are is a matter of
// the work alone, and what they find is put together in their order: results are the same to the
// last bit, whoever did what.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>

#include "spinlock.h"

namespace convoy {

constexpr int64_t kMostPieces = 8;

// The things from `first` to before `last`.
struct Piece {
  int64_t number, first, last;
};

// The pieces of one task that is being worked on.
class Offer {
 public:
  using Body = void (*)(const void* body, Piece piece);

  Offer(int64_t task, int64_t count, int64_t pieces, Body call, const void* body)
      : task(task), count_(count), pieces_(pieces), call_(call), body_(body) {}

  const int64_t task;

  // Takes a piece that nobody has taken; -1: there is none.
  int64_t take() {
    int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
    return i < pieces_ ? i : -1;
  }

  void work(int64_t i) const { call_(body_, {i, count_ * i / pieces_, count_ * (i + 1) / pieces_}); }

  void join() { helpers_.fetch_add(1, std::memory_order_relaxed); }

  // Does a piece for who has offered it; when that is done, the offer may be gone.
  void help(int64_t i) {
    try {
      work(i);
    } catch (...) {
      std::lock_guard<SpinLock> held(lock_);
      error_ = std::current_exception();
    }
    helpers_.fetch_sub(1, std::memory_order_release);
  }

  // Returns the seconds that this took.
  double wait_for_helpers() const {
    if (!helpers_.load(std::memory_order_acquire)) return 0;
    auto started = std::chrono::steady_clock::now();
    while (helpers_.load(std::memory_order_acquire)) pause();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  }

  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::atomic<int64_t> next_{0}, helpers_{0};
  const int64_t count_, pieces_;
  const Body call_;
  const void* const body_;
  SpinLock lock_;  // of the error
  std::exception_ptr error_;
};

// Where threads see what others offer: a place for each.
class Board {
 public:
  void open(int64_t threads) {
    if (threads != threads_) places_ = std::make_unique<Place[]>(threads);
    threads_ = threads;
  }

  // Shows a thread's offer, until it is taken back.
  void show(int64_t thread, Offer* offer) {
    auto& place = places_[thread];
    std::lock_guard<SpinLock> held(place.lock);
    place.offer = offer;
  }

  // A piece that a thread has taken of another's task: it must help with it now.
  struct Taken {
    Offer* offer = nullptr;
    int64_t piece = -1;
  };

  // Takes a piece of somebody's task, if one is offered.
  Taken take(int64_t thread) {
    for (int64_t i = 1; i < threads_; ++i)
      if (auto taken = take(places_[(thread + i) % threads_]); taken.offer) return taken;
    return {};
  }

 private:
  struct alignas(64) Place {  // a line of its own: all look at it, one writes
    SpinLock lock;
    std::atomic<Offer*> offer{nullptr};
  };

  static Taken take(Place& place) {
    if (!place.offer.load(std::memory_order_relaxed)) return {};
    std::lock_guard<SpinLock> held(place.lock);  // so that it is not taken back meanwhile
    Offer* offer = place.offer;
    if (!offer) return {};
    int64_t piece = offer->take();
    if (piece < 0) {
      place.offer = nullptr;  // so that nobody else comes for what is taken
      return {};
    }
    offer->join();
    return {offer, piece};
  }

  std::unique_ptr<Place[]> places_;
  int64_t threads_ = 0;
};

// Which board this thread works at, on what, and how long it has waited for who helped with that;
// outside of a step, at none.
struct Seat {
  Board* board = nullptr;
  int64_t thread = 0, task = -1;
  double waited_s = 0;

  static Seat& of_thread() {
    static thread_local Seat mine;
    return mine;
  }
};

// Sits down for a while.
class Seated {
 public:
  Seated(Board& board, int64_t thread) { Seat::of_thread() = {&board, thread}; }
  ~Seated() { Seat::of_thread() = {}; }
  Seated(const Seated&) = delete;
};

// Calls body(piece) for `count` things in some pieces, at once where others help.
template <typename F>
void in_pieces(int64_t count, const F& body, int64_t most = kMostPieces) {
  auto call = [](const void* given, Piece piece) { (*static_cast<const F*>(given))(piece); };
  Seat& seat = Seat::of_thread();
  Offer offer(seat.task, count, std::min(count, most), call, &body);
  auto work = [&] {
    for (int64_t piece; (piece = offer.take()) >= 0;) offer.work(piece);
  };
  if (!seat.board || std::min(count, most) < 2) return work();
  struct Shown {  // nobody may still be at work on what is gone, whatever happens
    Seat& seat;
    Offer& offer;
    Shown(Seat& seat, Offer& offer) : seat(seat), offer(offer) { seat.board->show(seat.thread, &offer); }
    ~Shown() {
      seat.board->show(seat.thread, nullptr);
      seat.waited_s += offer.wait_for_helpers();
    }
  };
  {
    Shown shown(seat, offer);
    work();
  }
  offer.rethrow();
}

}  // namespace convoy
