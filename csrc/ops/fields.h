// An operator's options, stated once. A table is a macro with FIELD(type, name, default) for each
// option. From it come the struct that C++ code passes around, a part of the schema, and the types
// in which the dispatcher passes the options, one after the other:
//
//   #define ONEPASS_X_OPTIONS(FIELD) FIELD(OptionalTensor, mask, "=None") FIELD(double, scale, "")
//   ONEPASS_DEFINE_OPTIONS(XOptions, ONEPASS_X_OPTIONS);
//   Tensor x(const XOptions& options, const Tensor& input);
//   entry<&x, &check_x>("x", "Tensor input, *" ONEPASS_SCHEMA(ONEPASS_X_OPTIONS), "Tensor")
//
// Once a schema is released, a new option goes to the end of a table and has a default.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "ops/tensor.h"

namespace onepass {

// The types of options, and their names in a schema.
using OptionalDouble = std::optional<double>;
using OptionalScalarType = std::optional<ScalarType>;
using Sizes = std::vector<int64_t>;
using StaticInt = int64_t;  // a choice: a compiler makes a graph for each value of it
#define ONEPASS_SCHEMA_Tensor "Tensor"
#define ONEPASS_SCHEMA_OptionalTensor "Tensor?"
#define ONEPASS_SCHEMA_OptionalDouble "float?"
#define ONEPASS_SCHEMA_OptionalScalarType "ScalarType?"
#define ONEPASS_SCHEMA_Sizes "SymInt[]"
#define ONEPASS_SCHEMA_StaticInt "int"
#define ONEPASS_SCHEMA_int64_t "SymInt"
#define ONEPASS_SCHEMA_double "float"
#define ONEPASS_SCHEMA_bool "bool"

#define ONEPASS_FIELD_MEMBER(type, name, default) type name;
#define ONEPASS_FIELD_TYPE(type, name, default) , type
#define ONEPASS_FIELD_SCHEMA(type, name, default) ", " ONEPASS_SCHEMA_##type " " #name default

// ", Tensor? mask=None, float scale"
#define ONEPASS_SCHEMA(TABLE) TABLE(ONEPASS_FIELD_SCHEMA)

template <class... Types>
struct TypeList;  // the first is void, for the comma after it

template <class One, class Other>
struct Joined;
template <class... One, class... Other>
struct Joined<TypeList<One...>, TypeList<void, Other...>> {
  using Types = TypeList<One..., Other...>;
};

#define ONEPASS_DEFINE_OPTIONS(Name, TABLE)                 \
  struct Name {                                             \
    using Types = TypeList<void TABLE(ONEPASS_FIELD_TYPE)>; \
    TABLE(ONEPASS_FIELD_MEMBER)                             \
  }

// Those of Base, and more after them.
#define ONEPASS_EXTEND_OPTIONS(Name, Base, TABLE)                                       \
  struct Name : Base {                                                                  \
    using Types = Joined<Base::Types, TypeList<void TABLE(ONEPASS_FIELD_TYPE)>>::Types; \
    TABLE(ONEPASS_FIELD_MEMBER)                                                         \
  }

// As the dispatcher calls function({options...}, others...): call(others..., options...). A
// function without options is called as it is.
template <auto function, class Types>
struct PackedAs;
template <class Result, class Options, class... Others,
          Result (*function)(const Options&, Others...), class... Fields>
struct PackedAs<function, TypeList<void, Fields...>> {
  static Result call(Others... others, Fields... fields) {
    return function(Options{std::move(fields)...}, std::forward<Others>(others)...);
  }
};
template <class Result, class... Others, Result (*function)(Others...)>
struct PackedAs<function, void> {
  static constexpr auto call = function;
};
template <class Result, class Options, class... Others>
typename Options::Types* types_of(Result (*)(const Options&, Others...));
void* types_of(...);
template <auto function>
struct Packed : PackedAs<function, std::remove_pointer_t<decltype(types_of(function))>> {};

}  // namespace onepass
