//! Runs a sequence of steps on a pair and compares the sides. [`run_rounds`] runs sequences from many seeds.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::actor::{ACTORS, Threads};
use super::allowed::allowed;
use super::call::{Call, Step};
use super::generate::Generator;
use super::observe::{self, Entry, Observation, errno_name};
use super::pair::{Pair, Setup, lock};
use super::perform::{Answer, Side};
use super::shrink::shrink;
use super::together::together;
use crate::tree_entry::show;

/// One field in which the sides differ.
#[derive(Clone, Debug)]
pub struct Difference {
    /// The step after which the difference was found.
    pub step: Step,
    /// The name of the field: `result`, or the name of a field of the call's answer or of an observed object.
    pub field: String,
    /// The object: a path, a slot, a path in a tree, or `answer` for the call's answer.
    pub object: String,
    /// The value on our mount.
    pub ours: String,
    /// The value on Linux.
    pub linux: String,
    /// Whether an object that the call names, or the directory of such an object, is immutable or append-only on
    /// Linux's side.
    pub guarded: bool,
    /// Whether the call named an empty directory that a snapshot has in place of a nested subvolume, or a name in such
    /// a directory.
    pub left_out: bool,
    /// Whether the object is the root of a nested subvolume, in a comparison of trees.
    pub is_subvolume: bool,
    /// Whether the object is a pipe.
    pub is_pipe: bool,
    /// Whether the object was written through a mapping since the mount.
    pub mapped: bool,
    /// If several threads ran, the earlier steps of the thread that performed `step`.
    pub before: Vec<Step>,
}

impl Difference {
    /// Returns the text by which a failure is recognized while its sequence is shrunk: the call, the field, and for the
    /// field `result` the values of both sides.
    pub fn signature(&self) -> String {
        let values = if self.field == "result" { format!(" {} {}", self.ours, self.linux) } else { String::new() };
        format!("{} {}{values}", self.step.call.name(), self.field)
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let user = ACTORS.get(self.step.user).map_or("?", |actor| actor.name);
        writeln!(f, "as {user}: {:?}", self.step.call)?;
        writeln!(f, "  {} {}", self.object, self.field)?;
        writeln!(f, "    ours:  {}", self.ours)?;
        write!(f, "    Linux: {}", self.linux)?;
        for step in &self.before {
            write!(f, "\n  before it: {}", serde_json::to_string(step).map_err(|_| fmt::Error)?)?;
        }
        Ok(())
    }
}

/// The failure of a sequence.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The text by which the failure is recognized. A shorter sequence that fails in the same way has the same
    /// signature.
    pub signature: String,
    /// A full description.
    pub text: String,
}

/// The result of a sequence.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The steps that were performed.
    pub steps: Vec<Step>,
    /// For each allowed difference, how often it occurred.
    pub allowed: BTreeMap<&'static str, u64>,
    /// For each call, how often it succeeded on Linux and how often it was made.
    pub succeeded: BTreeMap<String, (u64, u64)>,
    /// The first difference that is not allowed.
    pub failure: Option<Failure>,
    /// Whether an allowed difference ended the round.
    pub ended: bool,
}

/// The options of [`run_rounds`].
#[derive(Clone, Debug)]
pub struct Options {
    /// The setups of the pairs, used in turn.
    pub setups: Vec<Setup>,
    /// The seed of the first round. Each further round uses the next seed.
    pub seed: u64,
    /// The number of steps in a round.
    pub steps: usize,
    /// No round begins after this time. At least one round runs, even if the time is shorter.
    pub time: Duration,
    /// Whether to stop at the first failure. Otherwise the rounds continue, and each kind of failure is reported once.
    pub stop_at_first: bool,
    /// The largest number of rounds.
    pub rounds: usize,
    /// The time limit for shrinking a failing sequence.
    pub shrink_time: Duration,
}

/// Runs rounds. Returns a summary, or the text of all failures as the error.
pub fn run_rounds(options: &Options) -> Result<String, String> {
    let started = Instant::now();
    let mut failures: BTreeMap<String, String> = BTreeMap::new();
    let mut total = Outcome::default();
    let mut rounds = 0;
    let mut seed = options.seed;
    while rounds == 0 || (started.elapsed() < options.time && rounds < options.rounds) {
        let setup = &options.setups[rounds % options.setups.len()];
        let outcome = run(setup, Source::Random(Generator::new(seed), options.steps))
            .map_err(|error| format!("seed {seed}: {error:#}"))?;
        rounds += 1;
        add(&mut total, &outcome);
        if let Some(failure) = outcome.failure
            && !failures.contains_key(&failure.signature)
        {
            eprintln!("seed {seed}: {}\n  shrinking {} steps ...", failure.text, outcome.steps.len());
            let (steps, failure) = shrink(setup, outcome.steps, failure, options.shrink_time);
            let text = report(seed, setup, &steps, &failure);
            eprintln!("{text}");
            failures.insert(failure.signature, text);
            if options.stop_at_first {
                break;
            }
        }
        seed += 1;
    }
    let summary = summary(&total, rounds, started.elapsed());
    if failures.is_empty() {
        return Ok(summary);
    }
    let texts: Vec<String> = failures.into_values().collect();
    Err(format!("{} differences:\n{}\n{summary}", texts.len(), texts.join("\n")))
}

fn add(total: &mut Outcome, outcome: &Outcome) {
    total.steps.extend(outcome.steps.iter().cloned());
    for (name, count) in &outcome.allowed {
        *total.allowed.entry(name).or_default() += count;
    }
    for (name, (good, all)) in &outcome.succeeded {
        let sum = total.succeeded.entry(name.clone()).or_default();
        *sum = (sum.0 + good, sum.1 + all);
    }
}

fn summary(total: &Outcome, rounds: usize, time: Duration) -> String {
    let steps = total.steps.len();
    let mut text = format!("{steps} calls in {rounds} rounds, {} s\nsucceeded of all:", time.as_secs());
    for (name, (good, all)) in &total.succeeded {
        text.push_str(&format!(" {name} {good}/{all}"));
    }
    for (name, count) in &total.allowed {
        text.push_str(&format!("\nallowed: {name}: {count}"));
    }
    text
}

fn report(seed: u64, setup: &Setup, steps: &[Step], failure: &Failure) -> String {
    let mut text = format!(
        "seed {seed}, ubtrfs -o '{}', Linux -o '{}': {}\n{} steps, one a line; the example `differential` repeats them from a file:\n",
        setup.ubtrfs_options,
        setup.linux_options,
        failure.text,
        steps.len()
    );
    for step in steps {
        text.push_str(&serde_json::to_string(step).unwrap_or_else(|error| error.to_string()));
        text.push('\n');
    }
    text
}

/// The source of steps.
pub enum Source {
    /// A list of steps.
    Steps(Vec<Step>),
    /// A generator, and the number of steps.
    Random(Generator, usize),
}

impl Source {
    fn next(&mut self, at: usize) -> Option<Step> {
        match self {
            Self::Steps(steps) => steps.get(at).cloned(),
            Self::Random(generator, steps) => (at < *steps).then(|| generator.next_step()),
        }
    }

    fn learn(&mut self, step: &Step, linux: &Answer) {
        if let Self::Random(generator, _) = self {
            generator.learn(step, linux);
        }
    }
}

/// Performs a sequence on a new pair. An `Err` is a failure of the test bed itself.
pub fn run(setup: &Setup, mut source: Source) -> Result<Outcome> {
    // All threads of a process share one umask. After this call, this thread and the threads that it starts later share
    // a umask that no other thread uses.
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_FS)?;
    rustix::process::umask(rustix::fs::Mode::empty());
    let mut bed = Bed {
        pair: Pair::new(setup)?,
        threads: Threads::start()?,
        outcome: Outcome::default(),
        already_reported: BTreeSet::new(),
        mapped: BTreeMap::new(),
        stored: BTreeSet::new(),
        survey: setup.survey,
    };
    let mut at = 0;
    while let Some(step) = source.next(at) {
        at += 1;
        bed.outcome.steps.push(step.clone());
        let answer = bed.step(&step);
        match answer {
            Ok(linux) => source.learn(&step, &linux.unwrap_or_else(|| Ok(Vec::new()))),
            Err(error) => bed.fail(&step, "bed", format!("{error:#}")),
        }
        if bed.outcome.failure.is_some() || bed.outcome.ended {
            break;
        }
    }
    let Bed { mut pair, mut outcome, .. } = bed;
    if outcome.failure.is_none()
        && let Err(error) = pair.finish()
    {
        outcome.failure = Some(Failure { signature: "end".to_owned(), text: format!("at the end: {error:#}") });
    }
    Ok(outcome)
}

struct Bed {
    pair: Pair,
    threads: Threads,
    outcome: Outcome,
    survey: bool,
    already_reported: BTreeSet<String>,
    /// For each slot with a mapping, the inode number of the mapped file on our side.
    mapped: BTreeMap<usize, u64>,
    /// The inode numbers of files that were written through a mapping; see [`Difference::mapped`].
    stored: BTreeSet<u64>,
}

impl Bed {
    fn step(&mut self, step: &Step) -> Result<Option<Answer>> {
        match &step.call {
            Call::Umask { mask } => {
                rustix::process::umask(rustix::fs::Mode::from_raw_mode(*mask));
                // Stop the helpers for ioctls, because a helper keeps the umask that it was started with.
                for side in [&self.pair.ours, &self.pair.linux] {
                    lock(side).helpers.retain(|user, _| user.is_none());
                }
            }
            Call::Sync => self.pair.sync()?,
            Call::Compare => {
                let (ours, linux) = self.pair.walk()?;
                self.compare_trees(step, "tree", &ours, &linux, false);
            }
            Call::Remount | Call::Swap => self.reopen(step)?,
            Call::Together { seed } => {
                let found = together(&self.pair, *seed)?;
                self.judge(found);
                let (ours, linux) = self.pair.walk()?;
                self.compare_trees(step, "tree", &ours, &linux, false);
            }
            _ => return self.call(step).map(Some),
        }
        Ok(None)
    }

    /// Unmounts both sides and mounts them again, with exchanged images if the call is [`Call::Swap`]. The content of
    /// each image must be equal before and after.
    fn reopen(&mut self, step: &Step) -> Result<()> {
        // Sync first, because the block counts of dirty data may change when the data is written.
        self.pair.sync()?;
        let (mut ours, linux) = self.pair.walk()?;
        self.compare_trees(step, "tree", &ours, &linux, false);
        note_left_out(&mut ours, &linux);
        let swap = step.call == Call::Swap;
        if swap {
            self.pair.swap()?
        } else {
            self.pair.remount()?
        }
        let (mut ours_now, linux_now) = self.pair.walk()?;
        note_left_out(&mut ours_now, &linux_now);
        let (ours_then, linux_then) = if swap { (linux, ours) } else { (ours, linux) };
        let [first, second] = if swap {
            ["Linux's image before, and under ubtrfs", "our image before, and under Linux"]
        } else {
            ["our image before, and after the remount", "Linux's image before, and after the remount"]
        };
        self.compare_trees(step, first, &ours_now, &ours_then, true);
        self.compare_trees(step, second, &linux_now, &linux_then, true);
        // Forget all mappings: the unmount wrote their pages back, so no file has data that is only in a mapping.
        self.mapped.clear();
        self.stored.clear();
        Ok(())
    }

    fn call(&mut self, step: &Step) -> Result<Answer> {
        let paths = observed_paths(&step.call);
        let slots = step.call.slots();
        let mut answers = Vec::new();
        for side in [&self.pair.ours, &self.pair.linux] {
            let before = observe::look(&lock(side), &paths, &slots);
            let (side_there, call) = (Arc::clone(side), step.call.clone());
            let answer = self.threads.run(step.user, move || lock(&side_there).perform(&call))?;
            let side: &Side = &lock(side);
            answers.push((answer, before, observe::look(side, &paths, &slots)));
        }
        let (linux, linux_before, linux_after) = answers.pop().context("two sides")?;
        let (ours, ours_before, ours_after) = answers.pop().context("two sides")?;
        let counts = self.outcome.succeeded.entry(step.call.name()).or_default();
        *counts = (counts.0 + u64::from(linux.is_ok()), counts.1 + 1);
        self.note_store(&step.call, ours.is_ok());
        let mut found = Vec::new();
        let guarded = linux_before.iter().chain(&linux_after).any(|seen| seen.guarded);
        compare_answers(step, &ours, &linux, guarded, &mut found);
        for (index, (ours, linux)) in ours_after.iter().zip(&linux_after).enumerate() {
            let before = |seen: &[Observation]| seen.get(index).cloned();
            let ours_fields = observe::changes(before(&ours_before).as_ref(), ours);
            let linux_fields = observe::changes(before(&linux_before).as_ref(), linux);
            if linux.is_left_out() {
                let (ours, linux) = (made_up(ours_fields), made_up(linux_fields));
                compare_fields(step, "a subvolume that is left out", ours, linux, guarded, &mut found);
                continue;
            }
            let first = found.len();
            compare_fields(step, &ours.what, ours_fields, linux_fields, guarded, &mut found);
            let mapped = ours.ino().is_some_and(|ino| self.stored.contains(&ino));
            found[first..].iter_mut().for_each(|difference| difference.mapped = mapped);
        }
        let left_out = linux_before.iter().any(Observation::is_left_out);
        for difference in &mut found {
            difference.left_out = left_out;
            difference.is_pipe = linux_after.iter().any(|seen| seen.what == difference.object && seen.is_pipe());
        }
        self.judge(found);
        Ok(linux)
    }

    fn note_store(&mut self, call: &Call, done: bool) {
        match call {
            Call::Map { slot, .. } => {
                let ino =
                    lock(&self.pair.ours).slot(*slot).ok().and_then(|file| Some(rustix::fs::fstat(file).ok()?.st_ino));
                // If the slot is open, even a failed call removes the slot's old mapping.
                if ino.is_some() {
                    self.mapped.remove(slot);
                }
                self.mapped.extend(ino.filter(|_| done).map(|ino| (*slot, ino)));
            }
            Call::MapStore { slot, .. } => self.stored.extend(self.mapped.get(slot)),
            _ => {}
        }
    }

    fn compare_trees(&mut self, step: &Step, what: &str, ours: &[Entry], linux: &[Entry], one_image: bool) {
        let theirs: BTreeMap<&[u8], &Entry> = linux.iter().map(|entry| (entry.entry.path.as_slice(), entry)).collect();
        let mine: BTreeMap<&[u8], &Entry> = ours.iter().map(|entry| (entry.entry.path.as_slice(), entry)).collect();
        let mut found = Vec::new();
        for (path, entry) in &mine {
            let object = format!("{what}: {}", show(path));
            let mut mine = entry.fields(one_image);
            let mut other = theirs.get(path).map_or_else(absent, |other| other.fields(one_image));
            if entry.left_out || theirs.get(path).is_some_and(|other| other.left_out) {
                (mine, other) = (made_up(mine), made_up(other));
            }
            let first = found.len();
            compare_fields(step, &object, mine, other, false, &mut found);
            let is_subvolume = entry.is_subvolume || theirs.get(path).is_some_and(|other| other.is_subvolume);
            found[first..].iter_mut().for_each(|difference| difference.is_subvolume = is_subvolume);
        }
        for (path, entry) in theirs.iter().filter(|(path, _)| !mine.contains_key(*path)) {
            compare_fields(
                step,
                &format!("{what}: {}", show(path)),
                absent(),
                entry.fields(one_image),
                false,
                &mut found,
            );
        }
        self.judge(found);
    }

    fn judge(&mut self, found: Vec<Difference>) {
        // If an allowed difference ends the round, do not report the other differences of the call, because they are
        // its consequences.
        let ending = found.iter().find_map(|difference| allowed(difference).filter(|entry| entry.ends_round));
        if let Some(entry) = ending.filter(|_| !self.survey) {
            *self.outcome.allowed.entry(entry.name).or_default() += 1;
            self.outcome.ended = true;
            return;
        }
        for difference in found {
            if let Some(entry) = allowed(&difference) {
                *self.outcome.allowed.entry(entry.name).or_default() += 1;
            } else if !self.survey {
                let failure = || Failure { signature: difference.signature(), text: difference.to_string() };
                self.outcome.failure.get_or_insert_with(failure);
            } else if self.already_reported.insert(difference.signature()) {
                eprintln!("step {}: {difference}", self.outcome.steps.len());
            }
        }
    }

    fn fail(&mut self, step: &Step, kind: &str, text: String) {
        let text = format!("{:?}: {text}", step.call);
        self.outcome.failure = Some(Failure { signature: format!("{} {kind}", step.call.name()), text });
    }
}

/// Compares the two sides' answers to a call.
pub(crate) fn compare_answers(step: &Step, ours: &Answer, linux: &Answer, guarded: bool, found: &mut Vec<Difference>) {
    let fields = |answer: &Answer| match answer {
        Ok(fields) => [("result".to_owned(), "success".to_owned())].into_iter().chain(fields.clone()).collect(),
        Err(errno) => vec![("result".to_owned(), errno_name(*errno))],
    };
    compare_fields(step, "answer", fields(ours), fields(linux), guarded, found);
}

/// Marks our side's directories that stand in place of subvolumes that a snapshot left out. Inode numbers on Linux's
/// side identify these directories.
fn note_left_out(ours: &mut [Entry], linux: &[Entry]) {
    let left_out = linux.iter().filter(|entry| entry.left_out).map(|entry| entry.entry.path.as_slice());
    let left_out: BTreeSet<&[u8]> = left_out.collect();
    ours.iter_mut().for_each(|entry| entry.left_out |= left_out.contains(entry.entry.path.as_slice()));
}

/// Keeps only the kind and the mode of a directory that stands in place of a left-out subvolume, because the kernel or
/// the server makes up the other fields.
fn made_up(mut fields: Vec<(String, String)>) -> Vec<(String, String)> {
    fields.retain(|(name, _)| name == "kind" || name == "mode");
    fields
}

fn absent() -> Vec<(String, String)> {
    vec![("kind".to_owned(), "absent".to_owned())]
}

/// Adds the differences between two lists of fields to `found`.
fn compare_fields(
    step: &Step,
    object: &str,
    ours: Vec<(String, String)>,
    linux: Vec<(String, String)>,
    guarded: bool,
    found: &mut Vec<Difference>,
) {
    let mut theirs: BTreeMap<String, String> = linux.into_iter().collect();
    let mut add = |field: String, ours: String, linux: String| {
        let (step, object) = (step.clone(), object.to_owned());
        found.push(Difference {
            step,
            field,
            object,
            ours,
            linux,
            guarded,
            left_out: false,
            is_subvolume: false,
            is_pipe: false,
            mapped: false,
            before: Vec::new(),
        });
    };
    // If the first fields (kind or result) differ, the other fields are not compared.
    let first = ours.first().cloned();
    if let Some((name, value)) = first
        && let Some(other) = theirs.get(&name)
        && *other != value
    {
        add(name, value, other.clone());
        return;
    }
    for (name, value) in ours {
        let other = theirs.remove(&name).unwrap_or_else(|| "-".to_owned());
        if other != value {
            add(name, value, other);
        }
    }
    for (name, other) in theirs {
        add(name, "-".to_owned(), other);
    }
}

/// The paths to examine before and after a call: the paths that the call names, and their directories.
fn observed_paths(call: &Call) -> Vec<String> {
    let mut paths: Vec<String> = Vec::new();
    for path in call.paths() {
        let path = path.trim_end_matches('/');
        let parent = path.rsplit_once('/').map_or("", |(parent, _)| parent);
        for path in [path, parent] {
            if !paths.iter().any(|other| other == path) {
                paths.push(path.to_owned());
            }
        }
    }
    paths
}
