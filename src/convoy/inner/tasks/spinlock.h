// A lock that is held for a few instructions at a time: a sleep would take longer than the wait.

#pragma once

#include <atomic>
#include <thread>

namespace convoy {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

class SpinLock {
 public:
  void lock() {
    int tries = 0;
    while (held_.exchange(true, std::memory_order_acquire))
      while (held_.load(std::memory_order_relaxed))
        if (++tries < kSpins)
          pause();
        else
          std::this_thread::yield();  // its holder may be waiting for this very core
  }

  void unlock() { held_.store(false, std::memory_order_release); }

 private:
  static constexpr int kSpins = 1000;
  std::atomic<bool> held_{false};
};

}  // namespace convoy
