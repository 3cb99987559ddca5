// Work in pieces (pieces.h) with threads that help; test_pieces.py compiles and runs it.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "pieces.h"

using namespace convoy;

void check(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s\n", what);
  std::exit(1);
}

// Threads that look for something to help with, and remember the tasks, until they are told to stop.
class Helpers {
 public:
  Helpers(Board& board, int64_t threads) {
    for (int64_t thread = 1; thread < threads; ++thread)
      threads_.emplace_back([this, &board, thread] {
        while (!over_) {
          auto taken = board.take(thread);
          if (!taken.offer) {
            std::this_thread::yield();
            continue;
          }
          check(taken.offer->task == 7, "another task was helped with");
          taken.offer->help(taken.piece);
          ++pieces_;
        }
      });
  }

  bool were_needed() const { return threads_.empty() || pieces_ > 0; }

  void stop() {
    over_ = true;
    for (auto& thread : threads_) thread.join();
  }

 private:
  std::atomic<bool> over_{false};
  std::atomic<int64_t> pieces_{0};
  std::vector<std::thread> threads_;
};

// All things once, in pieces that are a matter of their number alone.
void cover(int64_t count) {
  std::vector<std::atomic<int>> times(count), pieces(kMostPieces);
  in_pieces(count, [&](Piece piece) {
    check(piece.first < piece.last, "an empty piece");
    ++pieces[piece.number];
    for (int64_t i = piece.first; i < piece.last; ++i) ++times[i];
    std::this_thread::yield();
  });
  for (auto& some : times) check(some == 1, "something was not done once");
  int64_t done = 0;
  for (auto& piece : pieces) done += piece;
  check(done == std::min(count, kMostPieces), "another number of pieces");
}

// A piece that fails is told to who offered, and only when nobody is at work on the others.
void fail(int64_t at) {
  std::atomic<int64_t> at_work{0};
  bool told = false;
  try {
    in_pieces(kMostPieces, [&](Piece piece) {
      ++at_work;
      std::this_thread::yield();
      --at_work;
      if (piece.number == at) throw std::runtime_error("this piece");
    });
  } catch (const std::runtime_error&) {
    told = true;
  }
  check(told, "an error was lost");
  check(at_work == 0, "somebody was still at work");
}

int main() {
  for (int64_t count = 0; count < 40; ++count) cover(count);
  fail(3);
  Board board;
  for (int64_t threads : {1, 2, 5}) {
    board.open(threads);
    Helpers helpers(board, threads);
    {
      Seated seated(board, 0);
      Seat::of_thread().task = 7;
      auto started = std::chrono::steady_clock::now();
      // Others may have the cores for a while.
      auto is_early = [&] { return std::chrono::steady_clock::now() - started < std::chrono::seconds(20); };
      for (int round = 0; round < 200 || (!helpers.were_needed() && is_early()); ++round) {
        cover(round % 40);
        fail(round % kMostPieces);
      }
      check(!board.take(threads - 1).offer, "what is done is still offered");
    }
    helpers.stop();
    check(helpers.were_needed(), "nobody helped");
  }
  check(!Seat::of_thread().board, "the seat was kept");
  std::printf("all pieces done\n");
}
