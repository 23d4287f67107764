//! Shortens a failing sequence: removes steps as long as the same failure remains (D2).

use std::time::{Duration, Instant};

use super::bed::{Failure, Source, run};
use super::call::Step;
use super::pair::Setup;

/// Returns the shortest sequence found within `time`, and its failure.
pub fn shrink(setup: &Setup, steps: Vec<Step>, failure: Failure, time: Duration) -> (Vec<Step>, Failure) {
    let started = Instant::now();
    let mut best = (steps, failure);
    let mut chunk = best.0.len() / 2;
    while chunk > 0 {
        // Start at the end, because late steps other than the very last one seldom matter.
        let mut end = best.0.len().saturating_sub(1);
        let mut shorter = false;
        while end > 0 {
            if started.elapsed() > time {
                return best;
            }
            let start = end.saturating_sub(chunk);
            let mut steps = best.0.clone();
            steps.drain(start..end);
            if let Some(found) = fails_alike(setup, steps, &best.1) {
                best = found;
                shorter = true;
            }
            end = start.min(best.0.len().saturating_sub(1));
        }
        if !(shorter && chunk == 1) {
            chunk /= 2;
        }
    }
    best
}

fn fails_alike(setup: &Setup, steps: Vec<Step>, like: &Failure) -> Option<(Vec<Step>, Failure)> {
    let outcome = run(setup, Source::Steps(steps)).ok()?;
    let failure = outcome.failure.filter(|failure| failure.signature == like.signature)?;
    Some((outcome.steps, failure))
}
