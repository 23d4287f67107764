//! Names of types: a search for a name finds one definition.
//!
//! - I1. No two types of the workspace have one name, apart from [`FAMILIES`]. This holds for private types, too, and
//!   for types inside of functions. Crate `testkit` and tests are left out.
//!
//! The scan reads sources that rustfmt has formatted; it is no parser.

use std::collections::BTreeMap;

use super::sources;

/// Names that several types have because they are always read with their module, and the crates of these types.
const FAMILIES: &[(&str, &[&str])] = &[
    // The arguments of a command, for clap: `check::Args`.
    ("Args", &["bench", "cli"]),
    // The commands of a group, for clap; private to the module of the group.
    ("Command", &["bench", "cli"]),
    // The commands that a module of `control` executes, and their results: `balance::Request`.
    ("Request", &["control"]),
    ("Response", &["control"]),
    // The failures of a floor, and its result: `ubtrfs_fs::Error`.
    ("Error", &["error", "fs", "ubtrfs"]),
    ("Result", &["control", "error", "fs", "remote", "ubtrfs"]),
];

/// The names of the types that a source file defines outside of its tests.
fn types(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut begins_macro = false;
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if line == "#[cfg(test)]" && lines.peek().is_some_and(|next| next.contains("mod ") && next.ends_with('{')) {
            break;
        }
        found.extend(defined(line));
        if line.ends_with("! {") || line.ends_with("!(") {
            begins_macro = !line.starts_with([' ', '/']);
        } else if begins_macro && !line.trim_start().starts_with(['/', '#']) {
            found.extend(defined_by_macro(line));
            begins_macro = false;
        }
    }
    found
}

/// The name of the type that a macro defines, such as `disk_struct!`; `line` is the first of its input.
fn defined_by_macro(line: &str) -> Option<&str> {
    let rest = line.trim_start();
    let name = rest.strip_suffix(" {").or_else(|| rest.strip_suffix(':')).unwrap_or(rest);
    let is_name = name.starts_with(|first: char| first.is_uppercase()) && name.chars().all(char::is_alphanumeric);
    is_name.then_some(name)
}

/// The name of the type that a line begins to define.
fn defined(line: &str) -> Option<&str> {
    let rest = line.trim_start();
    let is_inside = rest.len() < line.len();
    let rest = match rest.strip_prefix("pub(") {
        Some(rest) => rest.split_once(") ")?.1,
        None => rest.strip_prefix("pub ").unwrap_or(rest),
    };
    let rest = rest.strip_prefix("unsafe ").unwrap_or(rest);
    let (kind, rest) = rest.split_once(' ')?;
    // An indented `type` belongs to a trait.
    let is_type = matches!(kind, "struct" | "enum" | "trait" | "union") || kind == "type" && !is_inside;
    let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()?;
    (is_type && name.starts_with(|first: char| first.is_uppercase())).then_some(name)
}

#[test]
fn type_names_are_unique() {
    let sources = sources();
    let mut holders: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (path, text) in &sources {
        let mut parts = path.iter().skip(1).filter_map(|part| part.to_str());
        let (Some(krate), Some("src")) = (parts.next(), parts.next()) else { continue };
        if krate == "testkit" || path.to_string_lossy().ends_with("tests.rs") {
            continue;
        }
        for name in types(text) {
            if !FAMILIES.iter().any(|(other, crates)| *other == name && crates.contains(&krate)) {
                holders.entry(name).or_default().push(path.display().to_string());
            }
        }
    }
    let shared = holders.into_iter().filter(|(_, paths)| paths.len() > 1);
    let wrong: Vec<String> = shared.map(|(name, paths)| format!("{name}: {}", paths.join(", "))).collect();
    assert!(wrong.is_empty(), "types that share a name:\n  {}", wrong.join("\n  "));
}

#[test]
fn a_type_is_found_in_each_form() {
    let code = "pub struct A<T>(T);\npub(crate) enum B {\n    No,\n}\nunsafe trait C: Send {\n    type No;\n}\n\
                pub(in crate::x) type D = u8;\nfn f() {\n    struct E;\n    // struct No\n}\n#[cfg(test)]\nmod no_tests;\n\
                union F {}\ndisk_struct! {\n    /// No.\n    G {\n        no: u8,\n    }\n}\nnewtype!(\n    H\n);\n\
                numbered! {\n    I:\n    No = 1,\n}\ncodes! {\n    No = 1;\n    No\n}\n#[cfg(test)]\nmod tests {\n    struct No;\n}\n";
    assert_eq!(types(code), ["A", "B", "C", "D", "E", "F", "G", "H", "I"]);
}
