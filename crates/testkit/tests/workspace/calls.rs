//! Calls between the folders of a crate that go through its main type, such as `self.commit()` in a method of `Engine`.
//! Imports do not show these calls, because a method needs no import.
//!
//! A call on a part of the type, such as `self.names.clear()`, is a call to the folder of the part.
//!
//! The scan reads sources that rustfmt has formatted; it is no parser. It sees a call on `self` in an `impl` of the
//! type, and a call on a variable or field that has the type's name.
//!
//! - I1. A method or part that a folder defines is used by that folder and the folders above it.
//! - I2. A method in a file outside of the folders belongs to the highest folder that it uses, also through other such
//!   methods. So no call goes upward through such a file.

use std::collections::BTreeMap;

use super::{FOLDERS, Path, sources};

/// The main type of a crate, and the name of variables and fields that hold it.
const TYPES: &[(&str, &str, &str)] = &[("fs", "Fs", "fs"), ("transaction", "Engine", "engine")];

/// A folder calls a method of the main type.
type Calls = BTreeMap<(String, String), usize>;

/// The code of a source file without comments and tests. A chain of calls that rustfmt divided is one line again.
fn code_lines(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for line in text.lines().take_while(|line| *line != "#[cfg(test)]") {
        let code = line.split(" //").next().unwrap_or_default();
        if code.trim_start().starts_with("//") {
            continue;
        }
        match lines.last_mut() {
            Some(last) if code.trim_start().starts_with('.') => last.push_str(code.trim_start()),
            _ => lines.push(code.trim_end().to_owned()),
        }
    }
    lines
}

/// Whether a line opens an `impl` of `name`: the methods of the type itself, or a trait for it.
fn opens_impl(line: &str, name: &str) -> bool {
    let Some(head) = line.strip_prefix("impl").and_then(|rest| rest.strip_suffix(" {")) else { return false };
    let of = head.rsplit(' ').next().unwrap_or_default();
    of.rsplit("::").next() == Some(name)
}

/// The name of the method that a line of an `impl` begins to define.
fn defined(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("    ")?;
    let rest = rest.strip_prefix("pub").map_or(rest, |rest| rest.split_once(' ').map_or("", |(_, rest)| rest));
    let rest = rest.strip_prefix("const ").unwrap_or(rest).strip_prefix("fn ")?;
    rest.split(['(', '<']).next()
}

/// The methods that the `impl` blocks of the type define in a source file.
fn methods(text: &str, name: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut inside = false;
    for line in code_lines(text) {
        if line.starts_with(|first: char| !first.is_whitespace()) {
            inside = opens_impl(&line, name) && !line.contains(" for ");
        } else if let Some(method) = defined(&line).filter(|_| inside) {
            found.push(method.to_owned());
        }
    }
    found
}

/// The methods that the `impl` blocks of the type define in a source file, each as an `impl` with this method alone.
fn bodies(text: &str, name: &str) -> Vec<(String, String)> {
    let mut found: Vec<(String, String)> = Vec::new();
    let mut inside = false;
    for line in code_lines(text) {
        if line.starts_with(|first: char| !first.is_whitespace()) {
            inside = opens_impl(&line, name) && !line.contains(" for ");
            continue;
        }
        if !inside {
            continue;
        }
        if let Some(method) = defined(&line) {
            found.push((method.to_owned(), format!("impl {name} {{\n")));
        }
        if let Some((_, body)) = found.last_mut() {
            body.push_str(&line);
            body.push('\n');
        }
    }
    found
}

/// The methods of the type that a source file calls, once for each call. Methods of other types with the same name are
/// not told apart if the call is on a field with the type's name.
fn called(text: &str, name: &str, variable: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut inside = false;
    for line in code_lines(text) {
        if line.starts_with(|first: char| !first.is_whitespace()) {
            inside = opens_impl(&line, name);
        }
        let mut receivers = vec![format!("{variable}."), format!("{name}::")];
        if inside {
            receivers.extend(["self.".to_owned(), "Self::".to_owned()]);
        }
        for receiver in receivers {
            for (at, _) in line.match_indices(&receiver) {
                let before = line[..at].chars().next_back();
                let is_word = before.is_some_and(|c| c.is_alphanumeric() || c == '_');
                let is_field = before == Some('.') && receiver == "self.";
                let rest = &line[at + receiver.len()..];
                let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
                if !is_word && !is_field && rest[end..].starts_with('(') {
                    found.push(rest[..end].to_owned());
                }
            }
        }
    }
    found
}

/// The parts of the type, which are its fields, and the folder that defines the type of each field.
fn parts(text: &str, name: &str) -> Vec<(String, String)> {
    let lines = code_lines(text);
    let Some(first) = lines.iter().position(|line| *line == format!("pub struct {name} {{")) else { return Vec::new() };
    let fields = lines[first + 1..].iter().take_while(|line| *line != "}");
    let part = |line: &String| {
        let (field, of) = line.trim().trim_start_matches("pub(crate) ").trim_end_matches(',').split_once(": ")?;
        let import = lines.iter().find(|line| line.starts_with("use crate::") && names_type(line, of))?;
        let folder = import.trim_start_matches("use crate::").split("::").next()?;
        Some((field.to_owned(), folder.to_owned()))
    };
    fields.filter_map(part).collect()
}

/// Whether an import ends with this type, alone or in a group.
fn names_type(import: &str, of: &str) -> bool {
    import.trim_end_matches([';', '}']).split(['{', ',', ' ', ':']).any(|word| word == of)
}

/// The parts of the type that a source file uses, once for each use.
fn used_parts(text: &str, name: &str, variable: &str, parts: &[String]) -> Vec<String> {
    let mut found = Vec::new();
    let mut inside = false;
    for line in code_lines(text) {
        if line.starts_with(|first: char| !first.is_whitespace()) {
            inside = opens_impl(&line, name);
        }
        for part in parts {
            let own = if inside { line.matches(&format!("self.{part}.")).count() } else { 0 };
            let other = line.matches(&format!("{variable}.{part}.")).count();
            found.extend((0..own + other).map(|_| part.clone()));
        }
    }
    found
}

/// Calls of the crate's main type that go to a folder above the caller's.
fn upward(krate: &str, name: &str, variable: &str) -> Calls {
    let rooms = FOLDERS.iter().find(|(other, _)| *other == krate).expect("FOLDERS has the crate").1;
    let src = Path::new("crates").join(krate).join("src");
    let (mut in_folders, mut outside) = (Vec::new(), Vec::new());
    for (path, text) in sources().into_iter().filter(|(path, _)| !path.to_string_lossy().ends_with("tests.rs")) {
        let Ok(below) = path.strip_prefix(&src) else { continue };
        let room = below.iter().next().and_then(|first| first.to_str());
        match rooms.iter().position(|other| Some(*other) == room) {
            Some(floor) => in_folders.push((floor, text)),
            None => outside.push(text),
        }
    }
    let mut homes = BTreeMap::new();
    for (floor, text) in &in_folders {
        homes.extend(methods(text, name).into_iter().map(|method| (method, *floor)));
    }
    assert!(homes.len() > 50, "the methods of {name} were not found");
    let mut part_homes = BTreeMap::new();
    for text in outside.iter().chain(in_folders.iter().map(|(_, text)| text)) {
        for (part, folder) in parts(text, name) {
            part_homes.extend(rooms.iter().position(|other| *other == folder).map(|floor| (part, floor)));
        }
    }
    assert!(part_homes.len() > 5, "the parts of {name} were not found");
    let all_parts: Vec<String> = part_homes.keys().cloned().collect();
    let outside: Vec<(String, String)> = outside.iter().flat_map(|text| bodies(text, name)).collect();
    // I2: a method is found at its floor after as many passes as methods call each other.
    loop {
        let mut has_risen = false;
        for (method, body) in &outside {
            let of_methods = called(body, name, variable).into_iter().filter_map(|other| homes.get(&other).copied());
            let of_parts = used_parts(body, name, variable, &all_parts).into_iter().map(|part| part_homes[&part]);
            let Some(floor) = of_methods.chain(of_parts).max() else { continue };
            has_risen |= homes.insert(method.clone(), floor).is_none_or(|before| before < floor);
        }
        if !has_risen {
            break;
        }
    }
    let mut calls = Calls::new();
    for (floor, text) in &in_folders {
        let higher: Vec<String> =
            part_homes.iter().filter(|(_, home)| *home > floor).map(|(part, _)| part.clone()).collect();
        for part in used_parts(text, name, variable, &higher) {
            *calls.entry((rooms[*floor].to_owned(), part)).or_default() += 1;
        }
        for method in called(text, name, variable) {
            if homes.get(&method).is_some_and(|home| home > floor) {
                *calls.entry((rooms[*floor].to_owned(), method)).or_default() += 1;
            }
        }
    }
    calls
}

#[test]
fn folders_call_only_folders_below() {
    let mut wrong = Vec::new();
    for (krate, name, variable) in TYPES {
        for ((room, method), number) in upward(krate, name, variable) {
            wrong.push(format!("{krate}: {room} calls {name}::{method} of a higher folder {number} times"));
        }
    }
    assert!(wrong.is_empty(), "calls:\n  {}", wrong.join("\n  "));
}

#[test]
fn a_call_is_found_in_each_form() {
    let code = "impl crate::Fs {\n    pub(crate) fn one(&self) {\n        self.two(1);\n        self\n            .three();\n        \
                // self.no()\n        self.part.no();\n        let x = self.no;\n        Self::four();\n    }\n}\n\
                impl Other {\n    fn no(&self) {\n        self.no();\n        self.fs.five();\n        Fs::six();\n        \
                offs.no();\n    }\n}\n";
    assert_eq!(methods(code, "Fs"), ["one"]);
    let found = bodies(code, "Fs");
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].0.as_str(), called(&found[0].1, "Fs", "fs")), ("one", called(code, "Fs", "fs")[..3].to_vec()));
    assert_eq!(called(code, "Fs", "fs"), ["two", "three", "four", "five", "six"]);
    let code = "use crate::a::{A, Names};\nuse crate::b::C;\n\npub struct Fs {\n    pub(crate) names: Names,\n    c: C,\n}\n\nimpl Fs {\n    \
                fn one(&self) {\n        self.names.no(&fs.names.x, self.c);\n    }\n}\n";
    let of = |part: &str, folder: &str| (part.to_owned(), folder.to_owned());
    assert_eq!(parts(code, "Fs"), [of("names", "a"), of("c", "b")]);
    assert_eq!(used_parts(code, "Fs", "fs", &["names".to_owned(), "c".to_owned()]), ["names", "names"]);
    let of_trait = "impl Flusher for Fs {\n    fn no(&self) {\n        self.one();\n    }\n}\n";
    assert!(methods(of_trait, "Fs").is_empty());
    assert_eq!(called(of_trait, "Fs", "fs"), ["one"]);
}
