// How long the parts of a round take, from measurements.
#pragma once

#include <utility>
#include <vector>

namespace trtree {

// Seconds by size (rows, requests): a non-decreasing convex function near measured points,
// linear between them.
class CostCurve {
 public:
  // (size, seconds), sizes increasing. No points: no time at all. First the seconds are made
  // non-decreasing (least squares), then convex (the largest convex function below them,
  // through the first). Throws std::invalid_argument for sizes below 1 or out of order, and
  // seconds that are not positive and finite.
  explicit CostCurve(std::vector<std::pair<double, double>> points = {});

  // 0 for size 0; below the first point as there, beyond the last as steep as before it.
  double operator()(double size) const;

 private:
  std::vector<std::pair<double, double>> points_;
};

struct CostModel {
  CostCurve verify;  // a target pass and its commit without the drafter's context, by rows
  CostCurve draft;   // a drafter pass, by requests
  // In addition, a row's attention takes this for each committed token before it.
  double row_context_seconds = 0.0;
  CostCurve extend = CostCurve();  // extending the drafter's context, by committed rows

  double verify_seconds(double rows, double mean_context) const {
    return verify(rows) + row_context_seconds * rows * mean_context;
  }
};

}  // namespace trtree
