// Texts of messages and of the log, put together from their parts.
#pragma once

#include <sstream>
#include <string>
#include <tuple>

namespace onepass {

template <class... Parts>
std::string text_of(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// Parts that stand in the text only if `holds`; the text is made before the statement ends.
template <class... Parts>
struct When {
  bool holds;
  std::tuple<const Parts&...> parts;

  friend std::ostream& operator<<(std::ostream& text, const When& when) {
    if (when.holds) {
      std::apply([&](const Parts&... parts) { (text << ... << parts); }, when.parts);
    }
    return text;
  }
};
template <class... Parts>
When<Parts...> when(bool holds, const Parts&... parts) {
  return {holds, {parts...}};
}

}  // namespace onepass
