//! Several threads at once: each works in a separate directory, so that its answers do not depend on the other threads.
//!
//! The calls are made on Linux first, because a generator learns from Linux's answers. Then an equal number of threads
//! makes the same calls on our mount.

use std::path::Path;

use anyhow::{Context, Result};

use super::bed::{Difference, compare_answers};
use super::call::{Call, Step};
use super::generate::Generator;
use super::pair::{Pair, lock};
use super::perform::{Answer, Side};

const NR_THREADS: u64 = 4;
const NR_STEPS: usize = 120;

/// Makes random calls with several threads on both sides. Returns the differences between the answers.
pub(crate) fn together(pair: &Pair, seed: u64) -> Result<Vec<Difference>> {
    let linux_root = lock(&pair.linux).root.clone();
    let our_root = lock(&pair.ours).root.clone();
    let linux = on_threads(&linux_root, |number, side| chosen(side, seed.wrapping_add(number)))?;
    let ours = on_threads(&our_root, |number, side| {
        let steps = &linux[usize::try_from(number).unwrap_or(0)];
        steps.iter().map(|(step, _)| (step.clone(), side.perform(&step.call))).collect()
    })?;
    let mut found = Vec::new();
    for (ours, linux) in ours.iter().zip(&linux) {
        for (at, (ours, (step, answer))) in ours.iter().zip(linux).enumerate() {
            let nr_found = found.len();
            // It is not known whether the file was immutable or append-only during the call. So assume that it was
            // (`true`): then the differences that are allowed for such files are allowed here too.
            compare_answers(step, &ours.1, answer, true, &mut found);
            for difference in &mut found[nr_found..] {
                difference.before = linux[..at].iter().map(|(step, _)| step.clone()).collect();
            }
        }
    }
    Ok(found)
}

type Done = Vec<(Step, Answer)>;

fn on_threads(root: &Path, work: impl Fn(u64, &mut Side) -> Done + Sync) -> Result<Vec<Done>> {
    let mut sides = Vec::new();
    for number in 0..NR_THREADS {
        let dir = root.join(format!("thread-{number}"));
        std::fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
        sides.push((number, Side::new(&dir)));
    }
    Ok(std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> =
            sides.into_iter().map(|(number, mut side)| scope.spawn(move || work(number, &mut side))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread of calls does not panic")).collect()
    }))
}

/// Chooses random calls and performs them on one side. Skips calls that affect the whole pair or the whole process, and
/// calls that need a helper.
fn chosen(side: &mut Side, seed: u64) -> Done {
    let mut generator = Generator::new(seed);
    let mut done = Vec::new();
    while done.len() < NR_STEPS {
        let step = Step { user: 0, ..generator.next_step() };
        let is_of_thread = !matches!(
            step.call,
            Call::Umask { .. } | Call::Sync | Call::Compare | Call::Remount | Call::Swap | Call::Together { .. }
        ) && !step.call.is_of_subvolumes()
            && !step.call.is_of_mapping()
            // Skip a chown that sets neither user nor group: its effect differs between the sides (`chown-of-nothing`).
            // The difference would have to end the round, which is impossible while several threads run.
            && !matches!(step.call, Call::Chown { uid: None, gid: None, .. } | Call::Fchown { uid: None, gid: None, .. });
        if is_of_thread {
            let answer = side.perform(&step.call);
            generator.learn(&step, &answer);
            done.push((step, answer));
        }
    }
    done
}
