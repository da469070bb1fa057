//! Keeps ARCHITECTURE.md true: who imports whom, how long a file gets, which tests the table names.
//!
//! A rule that nobody checks is gone within a month. These checks read the sources as text; they
//! know no macro and no re-export, which is enough for the `crate::` paths this project writes.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// What each folder of `src/` may name after `crate::`; its own name is always allowed. The same
/// table, with the reasons, stands in ARCHITECTURE.md.
const LAYERS: &[(&str, &[&str])] = &[
    ("types", &["outside"]),
    ("clock", &[]),
    ("outside", &[]),
    ("watch", &[]),
    ("codec", &["types"]),
    ("config", &["types"]),
    ("machine", &["codec", "types"]),
    ("group", &["clock", "machine", "types", "watch"]),
    ("raft", &["clock", "codec", "group", "machine", "outside", "supervise", "types", "watch"]),
    ("coordinator", &["clock", "group", "machine", "store", "types", "watch"]),
    ("store", &["clock", "coordinator", "group", "machine", "types"]),
    ("provider", &["clock", "outside", "store", "types", "watch"]),
    (
        "bot",
        &[
            "clock",
            "coordinator",
            "group",
            "machine",
            "outside",
            "provider",
            "store",
            "types",
            "watch",
        ],
    ),
    (
        "http",
        &["bot", "clock", "coordinator", "group", "machine", "provider", "raft", "store", "types"],
    ),
    ("supervise", &["types"]),
];

/// Crates that stay inside their folder.
const CONFINED: &[(&str, &[&str])] = &[
    ("openraft", &["raft"]),
    ("sled", &["raft"]),
    ("axum", &["http", "raft", "cli"]),
    ("clap", &["cli"]),
    ("toml", &["config"]),
    ("bincode", &["codec", "raft", "machine"]),
];

/// What the pure machine may not touch.
const IMPURE: &[&str] =
    &["tokio", "rand", "Instant", "SystemTime", "f32", "f64", "thread", "async", "println"];

const LINES_MAX: usize = 600;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn sources(dir: &Path) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(&dir).unwrap().map(Result::unwrap) {
            let path = entry.path();
            if path.is_dir() {
                todo.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                found.push((path.strip_prefix(root()).unwrap().to_owned(), text));
            }
        }
    }
    found.sort();
    found
}

/// The folder or file directly under `src/`.
fn layer(path: &Path) -> String {
    let part = path.components().nth(1).unwrap().as_os_str().to_str().unwrap();
    part.trim_end_matches(".rs").to_owned()
}

/// Tests may use whatever they like: `mod tests;` files and what follows `#[cfg(test)]`.
fn code(path: &Path, text: &str) -> Option<String> {
    let is_test = path.components().any(|part| {
        let part = part.as_os_str().to_str().unwrap();
        part == "tests" || part == "tests.rs" || part.ends_with("_tests.rs")
    });
    if is_test {
        return None;
    }
    let end = text.find("#[cfg(test)]\nmod ").map_or(text.len(), |at| {
        // A declaration of a file (`mod tests;`) may stand anywhere; a block ends the file.
        let block = text[at..].find('{').unwrap_or(usize::MAX);
        let declaration = text[at..].find(';').unwrap_or(usize::MAX);
        if block < declaration { at } else { text.len() }
    });
    let lines = text[..end].lines().filter(|line| !line.trim_start().starts_with("//"));
    Some(lines.collect::<Vec<_>>().join("\n"))
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// Whether `word` stands in the text as a whole word.
fn has_word(text: &str, word: &str) -> bool {
    text.match_indices(word).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = text[at + word.len()..].chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    })
}

/// Whether `name::` stands there as a path's beginning.
fn names_crate(code: &str, name: &str) -> bool {
    let path = format!("{name}::");
    code.match_indices(&path).any(|(at, _)| {
        let before = code[..at].chars().next_back();
        !before.is_some_and(|c| is_word(c) || c == ':')
    })
}

/// The first names after each `crate::`, groups included.
fn crate_paths(code: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        if code[..at].chars().next_back().is_some_and(|c| is_word(c) || c == '$') {
            continue;
        }
        let rest = &code[at + "crate::".len()..];
        if let Some(group) = rest.strip_prefix('{') {
            let mut depth = 0;
            let mut word = String::new();
            for c in group.chars() {
                match c {
                    '{' => depth += 1,
                    '}' if depth == 0 => break,
                    '}' => depth -= 1,
                    _ if depth > 0 => {}
                    ',' => word.clear(),
                    c if is_word(c) => word.push(c),
                    ':' if !word.is_empty() => {
                        names.insert(std::mem::take(&mut word));
                        depth = 0;
                    }
                    _ => {}
                }
            }
        } else {
            names.insert(rest.chars().take_while(|c| is_word(*c)).collect());
        }
    }
    names.retain(|name| name.chars().next().is_some_and(|c| c.is_ascii_lowercase()));
    names
}

#[test]
fn the_readers_read_groups_and_whole_names() {
    assert!(names_crate("use sled::Db;", "sled") && names_crate("fn f() -> sled::Db", "sled"));
    assert!(!names_crate("use assled::Db; a::sled::b", "sled"));
    assert!(has_word("a tokio b", "tokio") && !has_word("tokios", "tokio"));
    let code = "use crate::machine::{A, B};\nuse crate::{clock::Clock, types::{X, y::Z}};\n\
                fn f() -> crate::store::Row {}\nmycrate::no();";
    let names: Vec<String> = crate_paths(code).into_iter().collect();
    assert_eq!(names, ["clock", "machine", "store", "types"]);
}

#[test]
fn layers_import_only_what_the_table_allows() {
    let table: BTreeMap<&str, &[&str]> = LAYERS.iter().copied().collect();
    let mut faults = Vec::new();
    for (path, text) in sources(&root().join("src")) {
        let layer = layer(&path);
        if matches!(layer.as_str(), "lib" | "main" | "cli" | "testing") {
            continue;
        }
        let allowed = table.get(layer.as_str()).unwrap_or_else(|| panic!("no row for src/{layer}"));
        let Some(code) = code(&path, &text) else { continue };
        for name in crate_paths(&code) {
            if name != layer && !allowed.contains(&name.as_str()) {
                faults.push(format!("{}: {layer} may not import {name}", path.display()));
            }
        }
    }
    assert!(faults.is_empty(), "against the table of layers:\n{}", faults.join("\n"));
}

#[test]
fn crates_stay_inside_their_folders() {
    let mut faults = Vec::new();
    for (path, text) in sources(&root().join("src")) {
        let layer = layer(&path);
        let Some(code) = code(&path, &text) else { continue };
        for (name, folders) in CONFINED {
            if names_crate(&code, name) && !folders.contains(&layer.as_str()) {
                faults.push(format!("{}: {name} belongs to {folders:?}", path.display()));
            }
        }
        if layer == "machine" {
            for word in IMPURE.iter().filter(|word| has_word(&code, word)) {
                faults.push(format!("{}: the machine is pure, {word} is not", path.display()));
            }
        }
    }
    assert!(faults.is_empty(), "confined crates and words:\n{}", faults.join("\n"));
}

#[test]
fn files_stay_readable() {
    let mut faults = Vec::new();
    for folder in ["src", "tests", "benches"] {
        for (path, text) in sources(&root().join(folder)) {
            let lines = text.lines().count();
            if lines > LINES_MAX {
                faults.push(format!("{}: {lines} lines, at most {LINES_MAX}", path.display()));
            }
            // Spelled apart, so that this file passes its own check.
            for hole in [concat!("todo", "!("), concat!("unimplemented", "!("), "#[ignore"] {
                // Measurements are run by hand, and a test may start another as its child process;
                // everything else runs always.
                let text = text
                    .replace("#[ignore = \"a measurement\"]", "")
                    .replace("#[ignore = \"runs as the child of the other tests here\"]", "");
                if !path.ends_with("architecture.rs") && text.contains(hole) {
                    faults.push(format!("{}: {hole}", path.display()));
                }
            }
            if folder == "src" && !text.trim_start().starts_with("//!") && !is_tests(&path) {
                faults.push(format!("{}: opens without saying what it is for", path.display()));
            }
        }
    }
    assert!(faults.is_empty(), "files:\n{}", faults.join("\n"));
}

fn is_tests(path: &Path) -> bool {
    code(path, "").is_none()
}

/// `tests/README.md` lists row → tests; a name there that no test has would be a promise unproven.
#[test]
fn the_table_of_rows_names_real_tests() {
    let mut tests = BTreeSet::new();
    for folder in ["src", "tests"] {
        for (_, text) in sources(&root().join(folder)) {
            tests.extend(test_names(&text));
        }
    }
    let table = fs::read_to_string(root().join("tests/README.md")).unwrap();
    let mut faults = Vec::new();
    let mut rows = 0;
    for line in table.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let row = cells[0];
        let is_row = row.len() <= 4
            && row.chars().next().is_some_and(|c| c.is_ascii_alphabetic())
            && row.chars().nth(1).is_some_and(|c| c.is_ascii_digit());
        if !is_row {
            continue;
        }
        rows += 1;
        let named: Vec<&str> = cells[1].split('`').skip(1).step_by(2).collect();
        if named.is_empty() {
            faults.push(format!("{row} names no test"));
        }
        for name in named {
            let lower = row.to_ascii_lowercase();
            let marked = name.starts_with(&format!("{lower}_"))
                || name.starts_with(&format!("case_{lower}_"));
            if !marked {
                faults.push(format!("{row}: `{name}` does not carry the row's id"));
            }
            if !tests.contains(name) {
                faults.push(format!("{row}: no test is called `{name}`"));
            }
        }
    }
    assert!(rows >= 20, "the table was not read: {rows} rows");
    assert!(faults.is_empty(), "tests/README.md:\n{}", faults.join("\n"));
}

/// Names of functions under an attribute that makes them a test.
fn test_names(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut marked = false;
    for line in text.lines().map(str::trim_start) {
        if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
            marked = true;
        } else if let Some(at) = line.find("fn ").filter(|_| !line.starts_with("//")) {
            if marked {
                names.push(line[at + 3..].chars().take_while(|c| is_word(*c)).collect());
            }
            marked = false;
        }
    }
    names
}
