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

  bool is_open() const { return next_.load(std::memory_order_relaxed) < pieces_; }

  // Does a piece that nobody has taken, if there is one.
  bool work() {
    int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
    if (i >= pieces_) return false;
    call_(body_, {i, count_ * i / pieces_, count_ * (i + 1) / pieces_});
    return true;
  }

  void join() { helpers_.fetch_add(1, std::memory_order_relaxed); }

  void help() {
    try {
      work();
    } catch (...) {
      std::lock_guard<SpinLock> held(lock_);
      error_ = std::current_exception();
    }
    helpers_.fetch_sub(1, std::memory_order_release);
  }

  void wait_for_helpers() const {
    while (helpers_.load(std::memory_order_acquire)) pause();
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

  // Does a piece of somebody's task; returns which task's, or -1 where nothing is offered.
  int64_t help(int64_t thread) {
    for (int64_t i = 1; i < threads_; ++i) {
      if (auto* offer = join(places_[(thread + i) % threads_])) {
        int64_t task = offer->task;  // it may be gone as soon as it has been helped with
        offer->help();
        return task;
      }
    }
    return -1;
  }

 private:
  struct alignas(64) Place {  // a line of its own: all look at it, one writes
    SpinLock lock;
    std::atomic<Offer*> offer{nullptr};
  };

  static Offer* join(Place& place) {
    if (!place.offer.load(std::memory_order_relaxed)) return nullptr;
    std::lock_guard<SpinLock> held(place.lock);  // so that it is not taken back meanwhile
    Offer* offer = place.offer;
    if (!offer) return nullptr;
    if (offer->is_open()) {
      offer->join();
      return offer;
    }
    place.offer = nullptr;  // so that nobody else comes for what is taken
    return nullptr;
  }

  std::unique_ptr<Place[]> places_;
  int64_t threads_ = 0;
};

// Which board this thread works at, and on what; outside of a step, at none.
struct Seat {
  Board* board = nullptr;
  int64_t thread = 0, task = -1;

  static Seat& of_thread() {
    static thread_local Seat mine;
    return mine;
  }
};

// Sits down for a while.
class Seated {
 public:
  Seated(Board& board, int64_t thread) { Seat::of_thread() = {&board, thread, -1}; }
  ~Seated() { Seat::of_thread() = {}; }
  Seated(const Seated&) = delete;
};

// Calls body(piece) for `count` things in some pieces, at once where others help.
template <typename F>
void in_pieces(int64_t count, const F& body, int64_t most = kMostPieces) {
  auto call = [](const void* given, Piece piece) { (*static_cast<const F*>(given))(piece); };
  Seat& seat = Seat::of_thread();
  Offer offer(seat.task, count, std::min(count, most), call, &body);
  if (!seat.board) {
    while (offer.work()) {}
    return;
  }
  struct Shown {  // nobody may still be at work on what is gone, whatever happens
    Seat& seat;
    Offer& offer;
    Shown(Seat& seat, Offer& offer) : seat(seat), offer(offer) { seat.board->show(seat.thread, &offer); }
    ~Shown() {
      seat.board->show(seat.thread, nullptr);
      offer.wait_for_helpers();
    }
  };
  {
    Shown shown(seat, offer);
    while (offer.work()) {}
  }
  offer.rethrow();
}

}  // namespace convoy
