//! Tests that each public item of the library has an example: in its own documentation, or for a method in an example
//! of the same file that calls it.

use std::fs;
use std::path::{Path, PathBuf};

/// A public item: the line of its declaration, and its documentation.
struct Item {
    declaration: String,
    docs: String,
}

impl Item {
    /// The name after `pub fn`, without parameters; `None` if the item is no function.
    fn function(&self) -> Option<&str> {
        let rest = self.declaration.strip_prefix("pub fn ")?;
        rest.split(['(', '<']).next()
    }
}

/// Returns the public items that a source file declares or exports, without fields, variants and what the documentation
/// hides.
fn items(source: &str) -> Vec<Item> {
    let kinds = ["fn", "struct", "enum", "trait", "type", "const", "static"];
    let (mut found, mut docs, mut is_hidden) = (Vec::new(), String::new(), false);
    for line in source.lines().map(str::trim) {
        if let Some(text) = line.strip_prefix("///") {
            docs.push_str(text.strip_prefix(' ').unwrap_or(text));
            docs.push('\n');
            continue;
        }
        if line.starts_with("#[") {
            is_hidden |= line == "#[doc(hidden)]";
            continue;
        }
        let exported = line.starts_with("pub use ubtrfs_") || line.starts_with("pub use uuid::");
        let is_item = exported || kinds.iter().any(|kind| line.starts_with(&format!("pub {kind} ")));
        if is_item && !std::mem::take(&mut is_hidden) {
            found.push(Item { declaration: line.to_owned(), docs: std::mem::take(&mut docs) });
        }
        docs.clear();
    }
    found
}

/// Returns the code blocks of a documentation.
fn examples(docs: &str) -> String {
    docs.split("```").skip(1).step_by(2).collect()
}

/// Whether an example calls a function.
fn calls(examples: &str, function: &str) -> bool {
    [".", "::"].iter().any(|before| examples.contains(&format!("{before}{function}(")))
}

/// The source files below a folder.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] }).collect()
}

#[test]
fn every_public_item_of_the_library_has_an_example() {
    let (mut nr_items, mut missing) = (0, Vec::new());
    for path in sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src")) {
        let source = fs::read_to_string(&path).unwrap();
        let items = items(&source);
        let of_file: String = items.iter().map(|item| examples(&item.docs)).collect();
        for item in items.iter().filter(|item| examples(&item.docs).is_empty()) {
            if !item.function().is_some_and(|function| calls(&of_file, function)) {
                missing.push(format!("{}: {}", path.display(), item.declaration));
            }
        }
        nr_items += items.len();
    }
    assert!(missing.is_empty(), "{missing:#?}");
    assert!(nr_items > 100, "only {nr_items} items were found");
}
