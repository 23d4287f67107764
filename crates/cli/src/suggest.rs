//! Finds the command that was meant by an unknown one.

/// Commands of btrfs-progs that this program does not have, with what to use.
const ABSENT: [(&str, &str); 2] = [
    ("restore", "files of an image, also of a damaged one, are copied by: ubtrfs cp -r IMAGE:/PATH DIRECTORY"),
    ("fsck", "a filesystem is checked by: ubtrfs check IMAGE"),
];

/// Explains which command may be meant by `word`, which is no subcommand of the command with these names. `names` begins
/// with the program's name.
pub(crate) fn command_meant(program: &clap::Command, names: &[String], word: &str) -> Option<String> {
    if let Some((_, text)) = ABSENT.iter().find(|(absent, _)| *absent == word) {
        return Some((*text).to_owned());
    }
    let mut all = Vec::new();
    collect(program, vec![program.get_name().to_owned()], &mut all);
    let list = |found: Vec<String>| match found.is_empty() {
        true => None,
        false => Some(format!("did you mean: {}", found.join(", "))),
    };
    let name_of = |command: &[String]| command.last().cloned().unwrap_or_default();
    let elsewhere = all.iter().filter(|command| name_of(command) == word);
    if let Some(text) = list(elsewhere.map(|command| command.join(" ")).collect()) {
        return Some(text);
    }
    let most = if word.chars().count() < 5 { 1 } else { 2 };
    let siblings = all.iter().filter(|command| command.split_last().is_some_and(|(_, parents)| parents == names));
    let near = siblings.map(|command| (distance(word, &name_of(command)), command)).filter(|(far, _)| *far <= most);
    let near: Vec<_> = near.collect();
    let least = near.iter().map(|(far, _)| *far).min()?;
    list(near.iter().filter(|(far, _)| *far == least).map(|(_, command)| command.join(" ")).collect())
}

fn collect(command: &clap::Command, names: Vec<String>, all: &mut Vec<Vec<String>>) {
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        let mut name = names.clone();
        name.push(sub.get_name().to_owned());
        collect(sub, name.clone(), all);
        all.push(name);
    }
}

/// Number of changes (a letter more, less, or another; two letters exchanged) between two words.
#[allow(clippy::arithmetic_side_effects, reason = "indexes of letters of two words")]
fn distance(one: &str, other: &str) -> usize {
    let (one, other): (Vec<char>, Vec<char>) = (one.chars().collect(), other.chars().collect());
    let mut rows = vec![(0..=other.len()).collect::<Vec<usize>>()];
    for (at, letter) in one.iter().enumerate() {
        let mut row = vec![at + 1];
        for (to, wanted) in other.iter().enumerate() {
            let kept = rows[at][to] + usize::from(letter != wanted);
            let mut least = kept.min(rows[at][to + 1] + 1).min(row[to] + 1);
            if at > 0 && to > 0 && *letter == other[to - 1] && one[at - 1] == *wanted {
                least = least.min(rows[at - 1][to - 1] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[one.len()][other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_between_words_are_counted() {
        let words = [("snapshot", "snaphot"), ("list", "lsit"), ("df", "du"), ("check", "check"), ("", "ab")];
        assert_eq!(words.map(|(one, other)| distance(one, other)), [1, 1, 1, 0, 2]);
    }
}
