// Runs a step's tasks on the threads of torch's own pool, outside the interpreter lock.
//
// A task is a list of ATen calls. Who waits for whom is fixed; which of the tasks that are ready
// goes first is decided by their priority. A thread prefers tasks of the sample group that it
// worked on before, whose numbers lie in its cache, and takes any other's when it would be idle.

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "calls.h"
#include "pieces.h"
#include "spinlock.h"

namespace convoy {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Task {
  std::vector<int64_t> instructions;
  std::vector<int64_t> next;
  double priority = 0;
  int64_t home = -1;  // whose cache holds its numbers; -1: nobody's
  int64_t section = 0;  // of the step
  int64_t num_before = 0;
};

struct Run {  // of a task, in the last step
  int64_t thread = -1;
  double ready = 0, start = 0, end = 0, waited = 0;
};

struct Help {  // with a piece of somebody's task
  int64_t thread, task;
  double start, end;
};

struct Value {
  c10::IValue held;
  int64_t num_readers = 0;
  std::atomic<int64_t> readers_left{0};
  bool kept = false;  // set from outside, or asked for afterwards
};

class Engine : public torch::CustomClassHolder {
 public:
  explicit Engine(int64_t num_values) : values_(num_values) {}

  int64_t add_instruction(
      std::string name, std::string overload, std::string text, std::vector<int64_t> outs) {
    auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    Instruction made{op, {}, std::move(outs)};
    Decoder decoder(text);
    for (const auto& argument : op.schema().arguments()) {
      made.arguments.push_back(decoder.next(argument.type()));
      for (auto slot : made.arguments.back().slots)
        if (slot >= 0) values_.at(slot).num_readers++;
    }
    TORCH_CHECK(decoder.done(), "too many arguments for ", name, ": ", text);
    instructions_.push_back(std::move(made));
    return instructions_.size() - 1;
  }

  void add_task(std::vector<int64_t> instructions, int64_t home, int64_t section) {
    tasks_.emplace_back();
    tasks_.back().instructions = std::move(instructions);
    tasks_.back().home = home;
    tasks_.back().section = section;
  }

  void add_edges(int64_t task, std::vector<int64_t> before) {
    tasks_.at(task).num_before = before.size();
    for (auto other : before) tasks_.at(other).next.push_back(task);
  }

  void clear_tasks() {
    tasks_.clear();
    next_section_ = 0;
  }

  void set_priorities(std::vector<double> priorities) {
    TORCH_CHECK(priorities.size() == tasks_.size());
    for (size_t i = 0; i < tasks_.size(); ++i) tasks_[i].priority = priorities[i];
  }

  void keep(int64_t slot) { values_.at(slot).kept = true; }

  void set(int64_t slot, at::Tensor tensor) {
    values_.at(slot).held = std::move(tensor);
    values_.at(slot).kept = true;
  }

  at::Tensor get(int64_t slot) { return values_.at(slot).held.toTensor(); }

  // Does a section of the step on so many threads of torch's pool; the caller's is one of them.
  // Sections follow each other: what one waits for is done by those before it.
  void run(int64_t threads, int64_t section) {
    begin(threads, section);
    at::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
      // A pool that is smaller than asked for gives one thread several places: one is enough.
      (void)last;
#ifdef _OPENMP
      // For this thread in this region: oneDNN would plan for several and wait for them for ever.
      // Torch sets the number when a thread first asks for it, so it must have asked before.
      (void)at::get_num_threads();
      if (omp_in_parallel()) omp_set_num_threads(1);
#endif
      work(first);
    });
    clear();
    if (error_) std::rethrow_exception(error_);
  }

  // Does the step on the caller's thread and takes the time of each call.
  void profile() {
    int64_t sections = 1;
    for (const auto& task : tasks_) sections = std::max(sections, task.section + 1);
    error_ = nullptr;
    profiling_ = true;
    for (int64_t section = 0; section < sections && !error_; ++section) {
      begin(1, section);
      work(0);
    }
    profiling_ = false;
    clear();
    if (error_) std::rethrow_exception(error_);
  }

  // Seconds of each instruction, measured by `profile`.
  at::Tensor costs() {
    auto found = at::empty({int64_t(instructions_.size())}, at::kDouble);
    for (size_t i = 0; i < instructions_.size(); ++i)
      found.data_ptr<double>()[i] = instructions_[i].seconds;
    return found;
  }

  // Thread, task, start and end of each piece that others did of a task in the last step.
  at::Tensor helps() {
    int64_t count = 0;
    for (const auto& helps : helps_) count += helps.size();
    auto found = at::empty({count, 4}, at::kDouble);
    auto* at = found.data_ptr<double>();
    for (const auto& helps : helps_)
      for (const auto& help : helps) {
        *at++ = help.thread;
        *at++ = help.task;
        *at++ = help.start;
        *at++ = help.end;
      }
    return found;
  }

  // Thread, ready, start, end and time waited for helpers of each task in the last step.
  at::Tensor times() {
    auto found = at::empty({int64_t(tasks_.size()), 5}, at::kDouble);
    auto* at = found.data_ptr<double>();
    for (const auto& run : runs_) {
      *at++ = run.thread;
      *at++ = run.ready;
      *at++ = run.start;
      *at++ = run.end;
      *at++ = run.waited;
    }
    return found;
  }

 private:
  using Entry = std::pair<double, int64_t>;  // priority, minus the task's number

  // Makes ready what a section starts with; the first one begins the step.
  void begin(int64_t threads, int64_t section) {
    if (section == 0) begin_step();
    TORCH_CHECK(section == next_section_, "a section of the step that comes before was not done");
    next_section_ = section + 1;
    section_ = section;
    num_ready_ = 0;
    queues_.assign(threads, {});
    board_.open(threads);
    if (int64_t(helps_.size()) < threads) helps_.resize(threads);
    left_ = 0;
    double now = seconds_since(started_);
    for (size_t i = 0; i < tasks_.size(); ++i) {
      if (tasks_[i].section != section) continue;
      ++left_;
      if (before_left_[i] == 0) push(i, 0, now);
    }
    over_ = left_ == 0;
  }

  void begin_step() {
    error_ = nullptr;
    next_section_ = 0;
    started_ = Clock::now();
    helps_.clear();
    runs_.assign(tasks_.size(), {});
    before_left_.resize(tasks_.size());
    for (size_t i = 0; i < tasks_.size(); ++i) before_left_[i] = tasks_[i].num_before;
    for (auto& value : values_) value.readers_left = value.num_readers;
  }

  // Drops what an abandoned step has left behind.
  void clear() {
    if (!error_) return;
    for (auto& value : values_)
      if (!value.kept) value.held = c10::IValue();
  }

  void work(int64_t thread) {
    // What is computed here is never differentiated: the step holds its own backward pass.
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    Seated seated(board_, thread);
    std::vector<c10::IValue> stack;
    int64_t task = take(thread);
    while (task >= 0) {
      auto& run = runs_[task];
      run.thread = thread;
      Seat::of_thread().task = task;
      Seat::of_thread().waited_s = 0;
      run.start = seconds_since(started_);
      try {
        for (auto number : tasks_[task].instructions) call(instructions_[number], stack);
      } catch (...) {
        abandon(std::current_exception());
        return;
      }
      run.end = seconds_since(started_);
      run.waited = Seat::of_thread().waited_s;
      task = finish(task, thread, run.end);
    }
  }

  void call(Instruction& instruction, std::vector<c10::IValue>& stack) {
    auto started = profiling_ ? Clock::now() : Clock::time_point();
    stack.clear();
    for (const auto& argument : instruction.arguments) stack.push_back(load(argument));
    try {
      instruction.op.callBoxed(&stack);
    } catch (const std::exception& error) {
      TORCH_CHECK(false, instruction.op.schema().name(), ": ", error.what());
    }
    for (size_t i = 0; i < instruction.outs.size(); ++i)
      if (instruction.outs[i] >= 0) values_[instruction.outs[i]].held = std::move(stack[i]);
    stack.clear();
    for (const auto& argument : instruction.arguments)
      for (auto slot : argument.slots)
        if (slot >= 0) release(values_[slot]);
    if (profiling_) instruction.seconds = seconds_since(started);
  }

  c10::IValue load(const Argument& argument) {
    if (argument.kind == Argument::kConstant) return argument.constant;
    if (argument.kind == Argument::kSlot) return values_[argument.slots[0]].held;
    if (argument.optional) return load_with_gaps(argument);
    c10::List<at::Tensor> found;
    found.reserve(argument.slots.size());
    for (auto slot : argument.slots) found.push_back(values_[slot].held.toTensor());
    return found;
  }

  c10::IValue load_with_gaps(const Argument& argument) {
    c10::List<std::optional<at::Tensor>> found;
    for (auto slot : argument.slots)
      found.push_back(slot < 0 ? std::nullopt : std::make_optional(values_[slot].held.toTensor()));
    return found;
  }

  static void release(Value& value) {
    if (value.readers_left.fetch_sub(1, std::memory_order_acq_rel) == 1 && !value.kept)
      value.held = c10::IValue();
  }

  // ---------------------------------------------------------------- who does what

  void push(int64_t task, int64_t thread, double now) {
    auto home = tasks_[task].home;
    auto& queue = queues_[home < 0 ? thread : home % queues_.size()];
    queue.emplace_back(tasks_[task].priority, -task);
    std::push_heap(queue.begin(), queue.end());
    runs_[task].ready = now;
    ++num_ready_;
  }

  // The best of all that are ready; among equals one whose numbers are in this thread's cache.
  // Call with the lock held.
  int64_t pop(int64_t thread) {
    std::vector<Entry>* best = &queues_[thread];
    for (auto& queue : queues_) {
      if (queue.empty()) continue;
      if (best->empty() || queue.front().first > best->front().first * kPreferred) best = &queue;
    }
    if (best->empty()) return -1;
    std::pop_heap(best->begin(), best->end());
    auto task = -best->back().second;
    best->pop_back();
    --num_ready_;
    return task;
  }

  int64_t take(int64_t thread) {
    while (true) {
      if (!num_ready_ && !over_) spin(thread);
      if (!num_ready_ && !over_) sleep();
      if (over_) return -1;
      std::lock_guard<SpinLock> lock(lock_);
      auto task = pop(thread);
      if (task >= 0) return task;
    }
  }

  // A sleeper is awake again some 50 us after it is called: far too late for a short wait.
  void spin(int64_t thread) {
    auto started = Clock::now();
    while (is_idle() && seconds_since(started) < kSpin_s) {
      if (help(thread)) started = Clock::now();
      for (int i = 0; i < kSpins && is_idle(); ++i) pause();
    }
  }

  bool is_idle() const { return !num_ready_.load(std::memory_order_acquire) && !over_; }

  // Does a piece of another thread's task; false: none is offered.
  bool help(int64_t thread) {
    auto taken = board_.take(thread);
    if (!taken.offer) return false;
    Help done{thread, taken.offer->task, seconds_since(started_), 0};
    taken.offer->help(taken.piece);
    done.end = seconds_since(started_);
    helps_[thread].push_back(done);
    return true;
  }

  // Until something is ready. An offer wakes nobody, for whoever makes one would have to look for
  // sleepers each time: they find it when they look around again.
  void sleep() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++num_asleep_;
    wake_.wait_for(lock, std::chrono::milliseconds(1), [&] { return num_ready_ || over_; });
    --num_asleep_;
  }

  void wake_others() {
    if (num_asleep_ == 0) return;
    { std::lock_guard<std::mutex> lock(mutex_); }  // who is about to sleep sleeps by now
    wake_.notify_all();
  }

  // Notes that a task is done, and returns what this thread does next; -1: nothing is left.
  int64_t finish(int64_t task, int64_t thread, double now) {
    int64_t mine = -1;
    {
      std::lock_guard<SpinLock> lock(lock_);
      for (auto next : tasks_[task].next)
        if (--before_left_[next] == 0 && tasks_[next].section == section_) push(next, thread, now);
      if (--left_ == 0) over_ = true;
      if (!over_) mine = pop(thread);
    }
    if (over_ || num_ready_) wake_others();
    if (over_) return -1;
    return mine >= 0 ? mine : take(thread);
  }

  void abandon(std::exception_ptr error) {
    {
      std::lock_guard<SpinLock> lock(lock_);
      if (!error_) error_ = error;
      over_ = true;
      next_section_ = 0;
    }
    wake_others();
  }

  static constexpr double kPreferred = 1.0 + 1e-9;
  static constexpr int kSpins = 8;           // between two looks at what others offer
  static constexpr double kSpin_s = 5e-4;    // as long as a long task

  std::vector<Value> values_;
  std::vector<Instruction> instructions_;
  std::vector<Task> tasks_;
  std::vector<Run> runs_;
  std::vector<int64_t> before_left_;
  std::vector<std::vector<Entry>> queues_;  // of what is ready, one for each thread
  Board board_;
  std::vector<std::vector<Help>> helps_;    // of each thread
  std::atomic<int64_t> num_ready_{0};
  std::atomic<bool> over_{false};
  std::atomic<int64_t> num_asleep_{0};
  int64_t section_ = 0, left_ = 0;  // what is being done, and how many tasks of it are not
  int64_t next_section_ = 0;        // which may be done then
  SpinLock lock_;     // of the queues
  std::mutex mutex_;  // of those who sleep
  std::condition_variable wake_;
  std::exception_ptr error_;
  bool profiling_ = false;
  Clock::time_point started_;
};

}  // namespace convoy

TORCH_LIBRARY(convoy_engine, m) {
  m.class_<convoy::Engine>("Engine")
      .def(torch::init<int64_t>())
      .def("add_instruction", &convoy::Engine::add_instruction)
      .def("add_task", &convoy::Engine::add_task)
      .def("add_edges", &convoy::Engine::add_edges)
      .def("clear_tasks", &convoy::Engine::clear_tasks)
      .def("set_priorities", &convoy::Engine::set_priorities)
      .def("keep", &convoy::Engine::keep)
      .def("set", &convoy::Engine::set)
      .def("get", &convoy::Engine::get)
      .def("run", &convoy::Engine::run)
      .def("profile", &convoy::Engine::profile)
      .def("costs", &convoy::Engine::costs)
      .def("times", &convoy::Engine::times)
      .def("helps", &convoy::Engine::helps);
}
