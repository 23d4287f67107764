//! Tests the repository's documents: the files, modules and items that they name exist, links lead somewhere, and no
//! document grows past the size that is read.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Largest sizes in bytes. A document that needs more room gets a page of its own for some of its content.
const LIMITS: &[(&str, usize)] = &[
    ("README.md", 8_000),
    ("ARCHITECTURE.md", 26_000),
    ("CONTRIBUTING.md", 8_000),
    ("docs/performance.md", 8_192),
    ("docs/guide/", 12_000),
    ("docs/design/", 8_192),
];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Adds the paths of all files below `dir` for which `wanted` returns true.
fn files_below(dir: &Path, wanted: &dyn Fn(&Path) -> bool, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.ends_with("target") {
            files_below(&path, wanted, found);
        } else if path.is_file() && wanted(&path) {
            found.push(path);
        }
    }
}

fn has_suffix(path: &Path, suffix: &str) -> bool {
    path.extension().is_some_and(|extension| extension == suffix)
}

/// All documents: their paths in the repository, and their texts.
fn documents() -> Vec<(String, String)> {
    let mut paths: Vec<PathBuf> = fs::read_dir(repository()).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| has_suffix(path, "md"));
    files_below(&repository().join("docs"), &|path| has_suffix(path, "md"), &mut paths);
    paths.sort();
    let name = |path: &Path| path.strip_prefix(repository()).unwrap().to_str().unwrap().to_owned();
    paths.iter().map(|path| (name(path), fs::read_to_string(path).unwrap())).collect()
}

/// The paths of all Rust sources, relative to `crates`.
fn source_paths() -> BTreeSet<String> {
    let mut paths = Vec::new();
    files_below(&repository().join("crates"), &|path| has_suffix(path, "rs"), &mut paths);
    let relative =
        |path: &PathBuf| path.strip_prefix(repository().join("crates")).unwrap().to_str().unwrap().to_owned();
    paths.iter().map(relative).collect()
}

/// Returns the parts of a document that are not in blocks of code.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    text.split("```").step_by(2)
}

/// Returns the texts between backticks, outside of code blocks.
fn code_spans(text: &str) -> Vec<&str> {
    prose(text).flat_map(|part| part.split('`').skip(1).step_by(2)).collect()
}

/// Whether `a::b::c` is a module or an item of one of our crates, or does not begin with one of our crates.
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
        let mut sources = Vec::new();
        files_below(&krate, &|path| has_suffix(path, "rs"), &mut sources);
        let kinds = ["fn", "struct", "enum", "trait", "mod", "const"];
        return sources.iter().any(|source| {
            let text = fs::read_to_string(source).unwrap();
            kinds.iter().any(|kind| {
                let item = format!("{kind} {segment}");
                text.match_indices(&item)
                    .any(|(at, _)| !text[at + item.len()..].starts_with(|c: char| c.is_alphanumeric() || c == '_'))
            })
        });
    }
    true
}

/// Whether a file of the repository has the path in this span. The path of a source may leave out its first folders. A
/// span that does not look like a path counts as correct.
fn leads_somewhere(span: &str, sources: &BTreeSet<String>) -> bool {
    let folders = ["crates/", "docs/", "scripts/", "fuzz/", ".ci/", "./"];
    let is_path = span.ends_with(".rs")
        || folders.iter().any(|folder| span.starts_with(folder))
        || span.contains("/src/")
        || span.contains("/tests/");
    // Capital letters stand for a name that the reader chooses.
    if !is_path || span.contains(['*', '<']) || span.contains("TARGET") {
        return true;
    }
    let path = span.split_whitespace().next().unwrap_or_default();
    let suffix = format!("/{path}");
    [repository(), repository().join("crates")].iter().any(|from| from.join(path).exists())
        || sources.iter().any(|source| source.ends_with(&suffix))
}

#[test]
fn every_path_and_module_that_a_document_names_exists() {
    let sources = source_paths();
    let mut missing = Vec::new();
    let mut nr_checked = 0;
    for (document, text) in documents() {
        for span in code_spans(&text) {
            let name = span.split(['(', '<', ' ', '\n']).next().unwrap();
            let exists = if name.contains("::") { names_something(name) } else { leads_somewhere(span, &sources) };
            nr_checked += u32::from(name.contains("::") || span.contains('/'));
            if !exists {
                missing.push(format!("{document}: {span}"));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
    assert!(nr_checked > 300, "only {nr_checked} names were found");
}

/// Returns the targets of the links in a document: `[text](target)`.
fn links(text: &str) -> Vec<&str> {
    prose(text).flat_map(|part| part.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0))).collect()
}

/// Returns the anchors of a document's headings, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).flat_map(str::lines).filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| {
        let title = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

#[test]
fn every_link_of_a_document_leads_to_a_file_and_a_heading() {
    let documents = documents();
    let mut broken = Vec::new();
    let mut nr_checked = 0;
    for (document, text) in &documents {
        for link in links(text).into_iter().filter(|link| !link.contains("://")) {
            nr_checked += 1;
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let here = repository().join(document);
            let target = if path.is_empty() { here } else { here.parent().unwrap().join(path) };
            let Ok(target) = target.canonicalize() else {
                broken.push(format!("{document}: {link}"));
                continue;
            };
            if !anchor.is_empty() && !anchors(&fs::read_to_string(target).unwrap()).contains(anchor) {
                broken.push(format!("{document}: {link}: no such heading"));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
    assert!(nr_checked > 50, "only {nr_checked} links were found");
}

#[test]
fn every_document_is_reached_by_links_from_the_readme() {
    let documents = documents();
    let mut reached = BTreeSet::new();
    let mut next = vec!["README.md".to_owned()];
    while let Some(name) = next.pop() {
        let Some((_, text)) = documents.iter().find(|(document, _)| *document == name) else { continue };
        if !reached.insert(name.clone()) {
            continue;
        }
        for link in links(text).into_iter().filter(|link| !link.contains("://")) {
            let path = link.split('#').next().unwrap();
            let target = repository().join(&name).parent().unwrap().join(path);
            if let Ok(target) = target.canonicalize() {
                next.extend(target.strip_prefix(repository()).ok().and_then(Path::to_str).map(str::to_owned));
            }
        }
    }
    let lost: Vec<&String> = documents.iter().map(|(name, _)| name).filter(|name| !reached.contains(*name)).collect();
    assert!(lost.is_empty(), "no link leads to {lost:?}");
}

#[test]
fn documents_that_sources_and_scripts_name_exist() {
    let mut paths = Vec::new();
    let is_source = |path: &Path| has_suffix(path, "rs") || has_suffix(path, "py") || path.extension().is_none();
    for dir in ["crates", "scripts", "fuzz/src", "fuzz/fuzz_targets"] {
        files_below(&repository().join(dir), &|path| is_source(path) && !path.ends_with("documents.rs"), &mut paths);
    }
    let mut missing = Vec::new();
    let mut nr_checked = 0;
    for path in paths {
        // The corpus of fuzz targets is not text.
        let Ok(text) = fs::read_to_string(&path) else { continue };
        for (at, _) in text.match_indices(".md") {
            let is_part = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
            let start = text[..at].rfind(|c| !is_part(c)).map_or(0, |before| before + 1);
            let name = text[start..at + 3].trim_start_matches("../");
            let is_document = name.starts_with("docs/") || name.starts_with(|c: char| c.is_ascii_uppercase());
            if is_document && !text[at + 3..].starts_with(|c: char| c.is_ascii_alphanumeric()) {
                nr_checked += 1;
                if !repository().join(name).is_file() {
                    missing.push(format!("{}: {name}", path.display()));
                }
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
    assert!(nr_checked > 5, "only {nr_checked} names were found");
}

#[test]
fn documents_stay_as_short_as_they_are_read() {
    let mut long = Vec::new();
    for (document, text) in documents() {
        for (name, limit) in LIMITS.iter().filter(|(name, _)| document == *name || document.starts_with(name)) {
            if text.len() > *limit {
                long.push(format!("{document}: {} bytes, the limit for {name} is {limit}", text.len()));
            }
        }
    }
    assert!(long.is_empty(), "shorten these, or give a part a page of its own: {long:#?}");
}

#[test]
fn changelog_entries_are_short() {
    let text = fs::read_to_string(repository().join("CHANGELOG.md")).unwrap();
    let long: Vec<&str> = text.split("\n- ").skip(1).filter(|entry| entry.lines().count() > 8).collect();
    assert!(long.is_empty(), "shorten these: {long:#?}");
}
