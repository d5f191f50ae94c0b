#include "runtime/cpp/cost_model.hpp"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <stdexcept>

#include "runtime/cpp/isotonic.hpp"

namespace trtree {

namespace {

void check_points(const std::vector<std::pair<double, double>>& points) {
  double previous = 0.0;
  for (const auto& [size, seconds] : points) {
    const bool in_order = size >= 1.0 && size > previous && std::isfinite(size);
    if (!in_order || !(seconds > 0.0) || !std::isfinite(seconds)) {
      std::ostringstream text;
      text << "cost of size " << size << " after " << previous << ": " << seconds
           << " seconds; sizes must be at least 1 and increase, seconds must be positive";
      throw std::invalid_argument(text.str());
    }
    previous = size;
  }
}

}  // namespace

CostCurve::CostCurve(std::vector<std::pair<double, double>> points) : points_(std::move(points)) {
  check_points(points_);
  std::vector<double> seconds;
  for (const auto& point : points_) seconds.push_back(point.second);
  seconds = non_decreasing_fit(seconds, std::vector<double>(seconds.size(), 1.0));

  std::vector<double> slopes;
  std::vector<double> widths;
  for (size_t i = 1; i < points_.size(); ++i) {
    widths.push_back(points_[i].first - points_[i - 1].first);
    slopes.push_back((seconds[i] - seconds[i - 1]) / widths.back());
  }
  slopes = non_decreasing_fit(slopes, widths);
  for (size_t i = 0; i < points_.size(); ++i) {
    points_[i].second = i == 0 ? seconds[0] : points_[i - 1].second + slopes[i - 1] * widths[i - 1];
  }
}

double CostCurve::operator()(double size) const {
  if (points_.empty() || size <= 0.0) return 0.0;
  if (size <= points_.front().first || points_.size() == 1) return points_.front().second;
  auto right = std::lower_bound(points_.begin(), points_.end(), size,
                                [](const auto& point, double s) { return point.first < s; });
  if (right == points_.end()) --right;
  const auto left = right - 1;
  const double slope = (right->second - left->second) / (right->first - left->first);
  return left->second + slope * (size - left->first);
}

}  // namespace trtree
