// The calls that a program is made of, and how they are written down.

#pragma once

#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace convoy {

// An argument: a value by its number, several of them, or a constant.
struct Argument {
  enum Kind { kConstant, kSlot, kSlots } kind = kConstant;
  c10::IValue constant;
  std::vector<int64_t> slots;  // -1: none
  bool optional = false;       // a list with gaps
};

struct Instruction {
  c10::OperatorHandle op;
  std::vector<Argument> arguments;
  std::vector<int64_t> outs;  // -1: nobody asks for it
  double seconds = 0;
};

// Reads an argument as tasks/engine.py writes it: a letter for what it is, then the value.
class Decoder {
 public:
  explicit Decoder(const std::string& text) : text_(text) {}

  bool done() const { return at_ >= text_.size(); }

  Argument next(const c10::TypePtr& type) {
    Argument found;
    if (peek() == 's') {
      ++at_;
      found.kind = Argument::kSlot;
      found.slots.push_back(integer());
    } else if (peek() == 'S') {
      ++at_;
      found.kind = Argument::kSlots;
      found.slots = integers();
      auto list = type->cast<c10::ListType>();
      found.optional = list && list->getElementType()->kind() == c10::TypeKind::OptionalType;
    } else {
      found.constant = constant(type);
      if (type->kind() == c10::TypeKind::TensorType && found.constant.isScalar())
        found.constant = at::native::wrapped_scalar_tensor(found.constant.toScalar());
    }
    return found;
  }

 private:
  char peek() const { return text_.at(at_); }

  std::string word() {
    auto stop = text_.find(' ', at_);
    if (stop == std::string::npos) stop = text_.size();
    auto found = text_.substr(at_, stop - at_);
    at_ = stop + 1;
    return found;
  }

  int64_t integer() { return std::stoll(word()); }

  std::vector<int64_t> integers() {
    std::vector<int64_t> found(integer());
    for (auto& item : found) item = integer();
    return found;
  }

  c10::IValue constant(const c10::TypePtr& type) {
    char kind = text_.at(at_++);
    switch (kind) {
      case 'n': word(); return c10::IValue();
      case 'b': return c10::IValue(integer() != 0);
      case 'i': return number(integer(), type);
      case 'f': return c10::IValue(std::stod(word()));
      case 'd': return c10::IValue(c10::Device(word()));
      case 't': return c10::IValue(word());
      case 'I': return c10::IValue(integers());
      case 'F': {
        std::vector<double> found(integer());
        for (auto& item : found) item = std::stod(word());
        return c10::IValue(found);
      }
      case 'B': {
        c10::List<bool> found;
        for (auto item : integers()) found.push_back(item != 0);
        return c10::IValue(found);
      }
      default: TORCH_CHECK(false, "unreadable argument: ", text_);
    }
  }

  // A whole number stands where a float is asked for, too.
  static c10::IValue number(int64_t value, const c10::TypePtr& type) {
    auto inner = type;
    if (auto optional = type->cast<c10::OptionalType>()) inner = optional->getElementType();
    if (inner->kind() == c10::TypeKind::FloatType) return c10::IValue(double(value));
    return c10::IValue(value);
  }

  const std::string& text_;
  size_t at_ = 0;
};

}  // namespace convoy
