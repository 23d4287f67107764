//! Tests that files, modules and items named in the repository's documents exist.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};

const DOCUMENTS: [&str; 4] = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/conformance.md"];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the texts between backticks, outside of code blocks.
fn code_spans(text: &str) -> Vec<&str> {
    let prose = text.split("```").step_by(2);
    prose.flat_map(|part| part.split('`').skip(1).step_by(2)).collect()
}

fn sources(dir: &Path, found: &mut String) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push_str(&fs::read_to_string(path).unwrap());
        }
    }
}

/// Whether `a::b::c` is a module or an item of one of our crates, or does not begin with one of our
/// crates.
fn names_something(path: &str) -> bool {
    let mut segments = path.split("::");
    let krate = repository().join("crates").join(segments.next().unwrap()).join("src");
    if !krate.is_dir() {
        return true;
    }
    let mut module = krate.clone();
    for segment in segments {
        module.push(segment);
        if module.is_dir() || module.with_extension("rs").is_file() {
            continue;
        }
        let mut text = String::new();
        sources(&krate, &mut text);
        let kinds = ["fn", "struct", "enum", "trait", "mod", "const"];
        return kinds.iter().any(|kind| {
            let item = format!("{kind} {segment}");
            text.match_indices(&item)
                .any(|(at, _)| !text[at + item.len()..].starts_with(|c: char| c.is_alphanumeric() || c == '_'))
        });
    }
    true
}

/// Whether a file of the repository has the path in this span. A span that does not look like a path counts as correct.
fn leads_somewhere(span: &str) -> bool {
    let is_path =
        span.ends_with(".rs") || span.starts_with("crates/") || span.contains("/src/") || span.contains("/tests/");
    if !is_path || span.contains([' ', '*', '<']) {
        return true;
    }
    [repository(), repository().join("crates")].iter().any(|from| from.join(span).exists())
}

#[test]
fn every_path_and_module_that_a_document_names_exists() {
    let mut missing = Vec::new();
    let mut nr_checked = 0;
    for document in DOCUMENTS {
        let text = fs::read_to_string(repository().join(document)).unwrap();
        for span in code_spans(&text) {
            let name = span.split(['(', '<', ' ']).next().unwrap();
            let exists = if name.contains("::") { names_something(name) } else { leads_somewhere(span) };
            nr_checked += u32::from(name.contains("::") || span.contains('/'));
            if !exists {
                missing.push(format!("{document}: {span}"));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
    assert!(nr_checked > 100, "only {nr_checked} names were found");
}

#[test]
fn changelog_entries_are_short_and_sorted_by_section() {
    let text = fs::read_to_string(repository().join("CHANGELOG.md")).unwrap();
    // Entries began with "Fixed:" before the changelog had sections. A merge that keeps both sides can bring such
    // entries back.
    let unsorted: Vec<&str> = text.lines().filter(|line| line.starts_with("- Fixed:")).collect();
    assert!(unsorted.is_empty(), "move these to the section Fixed, or delete them if they are there: {unsorted:#?}");
    let long: Vec<&str> = text.split("\n- ").skip(1).filter(|entry| entry.lines().count() > 8).collect();
    assert!(long.is_empty(), "shorten these: {long:#?}");
}
