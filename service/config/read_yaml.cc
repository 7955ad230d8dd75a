// SPDX-License-Identifier: Apache-2.0

#include "service/config/read_yaml.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <charconv>
#include <numeric>
#include <optional>
#include <sstream>
#include <system_error>
#include <type_traits>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "google/protobuf/descriptor.h"

namespace ebbtide::service {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

int LineOf(const YAML::Node& node) {
  return node.Mark().line + 1;
}

std::string Joined(const std::string& parent, const std::string& name) {
  return parent.empty() ? name : parent + "." + name;
}

// Levenshtein distance.
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

void CollectPaths(const Descriptor& schema, std::string parent, std::vector<std::string>& paths) {
  for (int i = 0; i < schema.field_count(); ++i) {
    const FieldDescriptor& field = *schema.field(i);
    paths.push_back(Joined(parent, field.name()));
    if (field.message_type() != nullptr) {
      CollectPaths(*field.message_type(), paths.back(), paths);
    }
  }
}

std::string_view LastWord(std::string_view path) {
  return path.substr(path.rfind('.') + 1);
}

// Where a key that is not known here may have been meant to stand.
std::string Suggestion(const Descriptor& root, const Descriptor& here, const std::string& parent,
                       std::string_view key) {
  if (key.size() > 64) {
    return "";
  }
  size_t least = std::max<size_t>(2, key.size() / 3) + 1;
  std::string nearest;
  for (int i = 0; i < here.field_count(); ++i) {
    const size_t distance = EditDistance(key, here.field(i)->name());
    if (distance < least) {
      least = distance;
      nearest = Joined(parent, here.field(i)->name());
    }
  }
  if (!nearest.empty()) {
    return absl::StrFormat("; did you mean %s?", nearest);
  }
  std::vector<std::string> paths;
  CollectPaths(root, "", paths);
  std::erase_if(paths, [&](const std::string& path) { return LastWord(path) != key; });
  return paths.empty() ? "" : absl::StrFormat("; did you mean %s?", absl::StrJoin(paths, " or "));
}

template <typename Integer>
std::optional<Integer> ParseInteger(std::string_view text) {
  Integer value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    return std::nullopt;
  }
  return value;
}

// Text of the file in an error: shortened, and without what a terminal would obey.
std::string Quoted(std::string_view text) {
  std::string quoted = "'";
  for (const char c : text.substr(0, 60)) {
    quoted += c >= ' ' && c <= '~' ? c : '?';
  }
  return quoted + (text.size() > 60 ? "…'" : "'");
}

class Reader {
 public:
  Reader(const Descriptor& root, YamlRead& read) : root_(root), read_(read) {}

  void ReadMapping(const YAML::Node& node, const std::string& parent, Message& message) {
    if (node.IsNull()) {
      return;
    }
    if (!node.IsMap()) {
      Mistake(node, parent,
              absl::StrFormat("%s: expected a mapping of fields",
                              parent.empty() ? "the file" : parent));
      return;
    }
    std::map<std::string, int> first_lines;
    for (const auto& entry : node) {
      const YAML::Node& key = entry.first;
      if (!key.IsScalar()) {
        Mistake(key, parent, "a key must be a plain word");
        continue;
      }
      const std::string path = Joined(parent, key.Scalar());
      const auto [first, is_new] = first_lines.try_emplace(key.Scalar(), LineOf(key));
      if (!is_new) {
        Mistake(key, path,
                absl::StrFormat("%s: given twice, first in line %d; keep one", Shown(path),
                                first->second));
        continue;
      }
      ReadField(key, entry.second, parent, message);
    }
  }

 private:
  static std::string Shown(std::string_view path) {
    const std::string quoted = Quoted(path);
    return quoted.substr(1, quoted.size() - 2);
  }

  // `section`: a path within it, or "".
  void Mistake(const YAML::Node& node, std::string_view section, std::string message) {
    read_.mistakes.push_back({LineOf(node), std::move(message)});
    read_.unread_sections.emplace(section.substr(0, section.find('.')));
  }

  void ReadField(const YAML::Node& key, const YAML::Node& value, const std::string& parent,
                 Message& message) {
    const Descriptor& schema = *message.GetDescriptor();
    const FieldDescriptor* field = schema.FindFieldByName(key.Scalar());
    const std::string path = Joined(parent, key.Scalar());
    if (field == nullptr) {
      Mistake(key, parent,
              absl::StrFormat("%s: unknown field%s", Shown(path),
                              Suggestion(root_, schema, parent, key.Scalar())));
      return;
    }
    if (field->message_type() != nullptr) {
      ReadMapping(value, path, *message.GetReflection()->MutableMessage(&message, field));
      return;
    }
    if (!value.IsScalar()) {
      Mistake(key, path,
              absl::StrFormat("%s: has no value; give one, or leave the line out", path));
      return;
    }
    if (SetScalar(*field, path, value, message)) {
      read_.lines[path] = LineOf(key);
    }
  }

  bool SetScalar(const FieldDescriptor& field, const std::string& path, const YAML::Node& value,
                 Message& message) {
    const std::string& text = value.Scalar();
    switch (field.cpp_type()) {
      case FieldDescriptor::CPPTYPE_STRING:
        message.GetReflection()->SetString(&message, &field, text);
        return true;
      case FieldDescriptor::CPPTYPE_BOOL:
        if (text != "true" && text != "false") {
          Mistake(value, path,
                  absl::StrFormat("%s: %s is neither true nor false", path, Quoted(text)));
          return false;
        }
        message.GetReflection()->SetBool(&message, &field, text == "true");
        return true;
      case FieldDescriptor::CPPTYPE_UINT32:
        SetInteger<uint32_t>(field, path, value, message);
        return true;
      default:
        SetInteger<uint64_t>(field, path, value, message);
        return true;
    }
  }

  template <typename Integer>
  void SetInteger(const FieldDescriptor& field, const std::string& path, const YAML::Node& value,
                  Message& message) {
    const std::optional<Integer> number = ParseInteger<Integer>(value.Scalar());
    if (!number.has_value()) {
      read_.no_numbers[path] = Quoted(value.Scalar());
      return;
    }
    if constexpr (std::is_same_v<Integer, uint32_t>) {
      message.GetReflection()->SetUInt32(&message, &field, *number);
    } else {
      message.GetReflection()->SetUInt64(&message, &field, *number);
    }
  }

  const Descriptor& root_;
  YamlRead& read_;
};

// Notes where a document starts, and nothing of what it holds.
class DocumentStart : public YAML::EventHandler {
 public:
  int line() const { return line_; }
  void OnDocumentStart(const YAML::Mark& mark) override { line_ = mark.line + 1; }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t,
                const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                  YAML::EmitterStyle::value) override {}
  void OnMapEnd() override {}

 private:
  int line_ = 0;
};

// The line of a second document, or of text that follows the first without belonging to it.
// YAML::LoadAll never returns where such text starts with a comma.
std::optional<int> LineOfSecondDocument(const std::string& text) {
  std::istringstream stream(text);
  YAML::Parser parser(stream);
  DocumentStart start;
  if (!parser.HandleNextDocument(start) || !parser.HandleNextDocument(start)) {
    return std::nullopt;
  }
  return start.line();
}

}  // namespace

YamlRead ReadYaml(std::string_view text, Message& message) {
  YamlRead read;
  if (text.size() > kYamlBytesMax) {
    read.mistakes.push_back({0, absl::StrFormat("the file has %d bytes, over the limit of %d",
                                                text.size(), kYamlBytesMax)});
    return read;
  }
  try {
    const std::string owned(text);
    if (const std::optional<int> line = LineOfSecondDocument(owned); line.has_value()) {
      read.mistakes.push_back({*line, "text beyond the first YAML document; only one is read"});
    }
    Reader(*message.GetDescriptor(), read).ReadMapping(YAML::Load(owned), "", message);
  } catch (const YAML::Exception& error) {
    read.mistakes.push_back({error.mark.line + 1, absl::StrFormat("not YAML: %s", error.msg)});
  }
  std::stable_sort(read.mistakes.begin(), read.mistakes.end(),
                   [](const auto& a, const auto& b) { return a.line < b.line; });
  return read;
}

}  // namespace ebbtide::service
